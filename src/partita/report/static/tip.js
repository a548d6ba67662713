// What is under the pointer: a box beside it, and the same words for screen readers.

import { make } from "./dom.js";

export class Tip {
  constructor(root) {
    this.box = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.live = make("div", { class: "unseen", role: "status", "aria-live": "polite" });
    root.append(this.box, this.live);
  }

  // Show lines beside a place of the window; the first line is the heading.
  show(lines, x, y) {
    this.box.replaceChildren(...lines.map((line, at) => make("div", { class: at ? "" : "tip-title" }, line)));
    this.box.hidden = false;
    const wide = this.box.offsetWidth;
    const high = this.box.offsetHeight;
    const left = x + 14 + wide > window.innerWidth ? x - wide - 14 : x + 14;
    const top = y + 14 + high > window.innerHeight ? y - high - 10 : y + 14;
    this.box.style.left = `${Math.max(4, left)}px`;
    this.box.style.top = `${Math.max(4, top)}px`;
  }

  hide() {
    this.box.hidden = true;
  }

  say(words) {
    this.live.textContent = words;
  }
}
