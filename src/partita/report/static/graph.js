// The model as a row of bars: an op or a group of them each, coloured by stage, as high as long.

import { formatValue } from "./format.js";
import { make, oncePerFrame, shape } from "./dom.js";
import { stageColour } from "./colours.js";
import { tableDetails } from "./table.js";

const HIGH = 74;

export class GraphStrip {
  constructor(figure, page) {
    this.figure = figure;
    this.page = page;
    this.at = -1;
    const stages = new Set(figure.table.rows.map((row) => row[1]));
    const label = `${figure.num_ops} ops in ${stages.size} stages, in the order of the data. Arrow keys walk along them.`;
    this.svg = shape("svg", { class: "graph", tabindex: 0, role: "img", "aria-label": label });
    this.element = make("div", { class: "figure-body" }, this.svg, tableDetails(figure));
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => page.tip.hide());
    this.svg.addEventListener("keydown", (event) => this.walk(event));
    this.redraw = oncePerFrame(() => this.draw());
    new ResizeObserver(this.redraw).observe(this.svg);
  }

  words(at) {
    const [name, stage, ops, seconds] = this.figure.table.rows[at];
    const shown = name.length > 300 ? `${name.slice(0, 300)}…` : name;
    return [shown, `stage ${stage}${ops > 1 ? ` · ${ops} ops` : ""}`, `${formatValue(seconds, "s")} forward and backward`];
  }

  draw() {
    const { rows } = this.figure.table;
    const width = this.svg.clientWidth || 600;
    const lines = Math.max(1, Math.ceil(rows.length / Math.max(1, Math.floor(width / 8))));
    const perLine = Math.max(1, Math.ceil(rows.length / lines));
    this.step = width / perLine;
    this.perLine = perLine;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${lines * HIGH}`);
    this.svg.style.height = `${lines * HIGH}px`;
    const longest = Math.max(...rows.map((row) => row[3]), 1e-300);
    this.bars = rows.map((row, at) => {
      const high = 4 + (HIGH - 26) * Math.sqrt(row[3] / longest);
      const line = Math.floor(at / perLine);
      return shape("rect", {
        x: ((at % perLine) * this.step + 0.75).toFixed(2),
        y: (line * HIGH + HIGH - 16 - high).toFixed(2),
        width: Math.max(1, this.step - 1.5).toFixed(2),
        height: high.toFixed(2),
        rx: 2,
        fill: stageColour(row[1]),
      });
    });
    this.svg.replaceChildren(...this.bars, ...this.labels());
  }

  // Name the stage where it begins: colour is not the only cue.
  labels() {
    const { rows } = this.figure.table;
    const found = [];
    let free = -1;
    rows.forEach((row, at) => {
      const begins = at === 0 || rows[at - 1][1] !== row[1] || at % this.perLine === 0;
      if (at % this.perLine === 0) free = -1;
      const x = (at % this.perLine) * this.step;
      if (!begins || x < free) return;
      const words = `${row[1]}`;
      free = x + 8 + words.length * 8;
      found.push(shape("text", { class: "tick", x: x + 1, y: Math.floor(at / this.perLine) * HIGH + HIGH - 3 }, words));
    });
    return found;
  }

  choose(at) {
    if (this.bars[this.at]) this.bars[this.at].removeAttribute("class");
    this.at = at;
    if (this.bars[at]) this.bars[at].setAttribute("class", "chosen");
  }

  hover(event) {
    if (!this.bars) return;
    const box = this.svg.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top) / HIGH);
    const at = line * this.perLine + Math.floor((event.clientX - box.left) / this.step);
    if (at < 0 || at >= this.bars.length) return;
    this.choose(at);
    this.page.tip.show(this.words(at), event.clientX, event.clientY);
  }

  walk(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.perLine, ArrowUp: -this.perLine }[event.key];
    if (!by || !this.bars) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(this.at + by, 0), this.bars.length - 1));
    this.page.tip.say(this.words(this.at).join(", "));
  }
}
