/* Search on pages that are opened from a folder, where browsers start no workers: a hidden frame of the page takes the place of one.
 * The offline plugin of mkdocs-material would load such a script from elsewhere; it looks for "iframe-worker" in `polyfills` of mkdocs.yml.
 */
if (location.protocol === "file:") {
  const tell = (target, data) => target.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));

  const load = (frame, src) =>
    new Promise((resolve, reject) => {
      const script = frame.document.createElement("script");
      Object.assign(script, { src, onload: resolve, onerror: reject });
      frame.document.body.append(script);
    });

  // Material's own script asks for this name.
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
      const shown = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      document.body.append(this.frame);
      this.started = shown.then(async () => {
        const inside = this.frame.contentWindow;
        inside.postMessage = (data) => tell(this, data);
        inside.importScripts = async (...urls) => {
          for (const each of urls) await load(inside, each);
        };
        await load(inside, url);
        return inside;
      });
    }

    postMessage(data) {
      this.started.then((inside) => tell(inside, data));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
