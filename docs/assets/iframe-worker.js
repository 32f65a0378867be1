// Search runs in a worker, which browsers refuse to pages that are opened from files: run it in a hidden frame there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}))
      const script = inside.document.createElement("script")
      script.src = url
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve))
      this.inside = inside
      inside.document.body.appendChild(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", {data})))
    }
  }
}
