"use strict";
// Shows the values of curves at the pointer. Sections may be replaced at any time, so elements are looked up at each event.
(function () {
  const near = (places, at) => {
    let low = 0, high = places.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (places[middle] < at) low = middle + 1; else high = middle; }
    return low > 0 && at - places[low - 1] < places[low] - at ? low - 1 : low;
  };
  const words = (value) => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(4)).toString();
  const forget = (plot) => { plot.classList.remove("read"); plot.querySelector(".read-out").hidden = true; };
  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest ? event.target.closest(".plot") : null;
    for (const other of document.querySelectorAll(".plot.read")) if (other !== plot) forget(other);
    if (!plot) return;
    const points = plot.points || (plot.points = JSON.parse(plot.dataset.points));
    if (!points.at.length) return;
    const sheet = plot.querySelector(".sheet").getBoundingClientRect();
    const at = (event.clientX - sheet.left) / sheet.width;
    const found = near(points.at, at), cursor = plot.querySelector(".cursor"), box = plot.querySelector(".read-out");
    const place = 100 * points.at[found] + "%";
    cursor.setAttribute("x1", place); cursor.setAttribute("x2", place);
    const under = points.under ? ", " + points.under[found] : "";
    const lines = [(points.unit + " " + words(points.x[found])).trim() + under];
    for (const [name, column] of Object.entries(points.curves)) {
      if (column[found] !== null) lines.push((name + " " + words(column[found])).trim());
    }
    box.textContent = lines.join("\n");
    box.hidden = false;
    plot.classList.add("read");
    if (points.at[found] > 0.5) { box.style.right = 100 - 100 * points.at[found] + 2 + "%"; box.style.left = "auto"; }
    else { box.style.left = 100 * points.at[found] + 2 + "%"; box.style.right = "auto"; }
  });
  document.addEventListener("pointerleave", () => document.querySelectorAll(".plot.read").forEach(forget));
})();
