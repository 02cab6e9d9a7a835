(() => {
  const main = document.querySelector("main");
  const banner = document.createElement("p");
  banner.id = "connection";
  banner.setAttribute("role", "status");
  document.body.prepend(banner);

  let key = null;
  let ended = false;
  const events = new EventSource("events" + location.search);

  const say = (kind, words) => {
    banner.className = kind;
    banner.textContent = words;
  };
  const clock = () => new Date().toLocaleTimeString();

  const show = (id, html) => {
    const template = document.createElement("template");
    template.innerHTML = html;
    const fresh = template.content.firstElementChild;
    const old = document.getElementById(id);
    if (!old) {
      if (id === "now") main.prepend(fresh); else main.append(fresh);
      return;
    }
    const open = [...old.querySelectorAll("details")].map((each) => each.open);
    fresh.querySelectorAll("details").forEach((each, at) => { if (at in open) each.open = open[at]; });
    old.replaceWith(fresh);
  };

  events.addEventListener("sections", (event) => {
    const news = JSON.parse(event.data);
    if (key !== null && news.key !== key) {
      location.reload();
      return;
    }
    key = news.key;
    for (const [id, html] of Object.entries(news.changed)) show(id, html);
    say("connected", "Live. Last change at " + clock());
  });
  events.addEventListener("end", (event) => {
    ended = true;
    events.close();
    say("over", JSON.parse(event.data).words);
  });
  events.onerror = () => {
    if (ended) return;
    const closed = events.readyState === EventSource.CLOSED;
    say("lost", "The connection is gone since " + clock() + (closed ? ". Load the page again to go on." : ". Trying again."));
  };
})();
