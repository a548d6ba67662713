// Lines over one axis, as SVG: frontiers, distributions, queues, losses, searches.

import { formatValue } from "./format.js";
import { make, oncePerFrame, shape } from "./dom.js";
import { lineColour } from "./colours.js";
import { roundTicks, secondsUnit, tickWords } from "./axis.js";
import { tableDetails } from "./table.js";

const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const MARGIN = { left: 62, right: 14, top: 26, bottom: 40 };

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (low === 0 && high === 0) return [0, 1];
  return low === high ? [low - Math.abs(low || 1) * 0.05, high + Math.abs(high || 1) * 0.05] : [low, high];
}

function unitFor(unit) {
  if (unit === "s") return secondsUnit;
  if (unit === "share") return () => [100, "%"];
  if (unit === "J") return (most) => (most >= 1e6 ? [1e-6, "MJ"] : most >= 1e3 ? [1e-3, "kJ"] : [1, "J"]);
  if (unit === "bytes") return (most) => (most >= 1e9 ? [1e-9, "GB"] : most >= 1e6 ? [1e-6, "MB"] : [1, "B"]);
  return () => [1, ""];
}

class Scale {
  constructor(domain, range, logarithmic) {
    this.logarithmic = logarithmic;
    this.domain = logarithmic ? domain.map((value) => Math.log10(Math.max(value, 1e-12))) : domain;
    this.range = range;
  }

  at(value) {
    const place = this.logarithmic ? Math.log10(Math.max(value, 1e-12)) : value;
    const [low, high] = this.domain;
    return this.range[0] + ((place - low) / (high - low)) * (this.range[1] - this.range[0]);
  }

  ticks(most) {
    if (!this.logarithmic) return roundTicks(this.domain[0], this.domain[1], most);
    const result = [];
    for (let power = Math.ceil(this.domain[0] - 1e-9); power <= this.domain[1] + 1e-9; power += 1) result.push(10 ** power);
    return result.length > 1 ? result : [10 ** this.domain[0], 10 ** this.domain[1]];
  }
}

function dashOf(curve, at) {
  return curve.style === "dashes" ? "5 4" : DASHES[at % DASHES.length];
}

function keyOf(curve, at) {
  const sample = shape("svg", { width: 26, height: 10, "aria-hidden": "true" });
  if (curve.style === "points") sample.append(shape("circle", { cx: 13, cy: 5, r: 4, fill: lineColour(at) }));
  else sample.append(shape("line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke: lineColour(at), "stroke-width": 2.5, "stroke-dasharray": dashOf(curve, at) }));
  return make("span", { class: "key" }, sample, curve.name);
}

// Return the legend of a chart; a key that is pointed at shows its line in all charts of the group.
export function legendOf(figure, page) {
  const keys = figure.curves.map((curve, at) => {
    const key = keyOf(curve, at);
    key.addEventListener("pointerenter", () => page.bus.emit(`line ${figure.group}`, curve.name));
    key.addEventListener("pointerleave", () => page.bus.emit(`line ${figure.group}`, null));
    return key;
  });
  return make("div", { class: "legend" }, ...keys);
}

export class Chart {
  constructor(figure, page) {
    this.figure = figure;
    this.page = page;
    this.marker = null;
    this.chosen = 0;
    this.ruler = null;
    this.lit = null;
    this.svg = shape("svg", { class: "chart", tabindex: 0, role: "img", "aria-label": this.words() });
    const legend = figure.legend === "above" ? null : legendOf(figure, page);
    this.element = make("div", { class: "figure-body" }, legend, this.svg, tableDetails(figure));
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => {
      page.tip.hide();
      this.pointAt(null);
      this.tell(null);
    });
    this.svg.addEventListener("keydown", (event) => this.key_down(event));
    this.redraw = oncePerFrame(() => this.draw());
    new ResizeObserver(this.redraw).observe(this.svg);
    page.onTheme(this.redraw);
    if (figure.follows) page.bus.on(figure.follows, (value) => this.mark(value));
    page.bus.on(`line ${figure.group}`, (name) => this.light(name));
    if (figure.group) page.bus.on(`x ${figure.group} ${figure.x.title}`, (value) => this.rule(value));
  }

  words() {
    const lines = this.figure.curves.map((curve) => curve.name).slice(0, 8).join(", ");
    return `${this.figure.title}: ${this.figure.y.title} over ${this.figure.x.title}; lines ${lines}. Arrow keys walk along the points.`;
  }

  // Tell the charts of the group which place of their common axis is looked at.
  tell(value) {
    if (this.figure.group) this.page.bus.emit(`x ${this.figure.group} ${this.figure.x.title}`, value);
  }

  rule(value) {
    this.ruler = value;
    this.placeRuler();
  }

  placeRuler() {
    if (!this.x || !this.rulerLine) return;
    const x = this.ruler === null ? -20 : this.x.at(this.ruler);
    this.rulerLine.setAttribute("x1", x);
    this.rulerLine.setAttribute("x2", x);
  }

  light(name) {
    this.lit = name;
    this.figure.curves.forEach((curve, at) => {
      for (const part of this.parts ? this.parts[at] : []) part.setAttribute("opacity", name === null || curve.name === name ? 1 : 0.2);
    });
  }

  mark(value) {
    this.marker = value;
    this.redraw();
  }

  draw() {
    const width = Math.max(280, this.svg.clientWidth || 600);
    const height = this.svg.clientHeight || 260;
    const { figure, svg } = this;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const xs = extent(figure.curves.flatMap((curve) => curve.x).filter((value) => !figure.logarithmic || value > 0));
    const ys = extent(figure.curves.flatMap((curve) => curve.y));
    if (figure.from_zero) ys[0] = Math.min(0, ys[0]);
    if (figure.x_from_zero) xs[0] = Math.min(0, xs[0]);
    const room = (ys[1] - ys[0]) * 0.06;
    this.x = new Scale(xs, [MARGIN.left, width - MARGIN.right], figure.logarithmic);
    this.y = new Scale([figure.from_zero ? ys[0] : ys[0] - room, ys[1] + room], [height - MARGIN.bottom, MARGIN.top], false);
    this.rulerLine = shape("line", { class: "ruler", x1: -20, x2: -20, y1: MARGIN.top, y2: height - MARGIN.bottom });
    this.parts = figure.curves.map((curve, at) => this.line(curve, at));
    svg.replaceChildren(...this.frame(width, height), this.rulerLine, ...this.parts.flat());
    this.placeRuler();
    if (this.marker) svg.append(shape("circle", { class: "marker", cx: this.x.at(this.marker.x), cy: this.y.at(this.marker.y), r: 6 }));
    this.dot = shape("circle", { class: "dot", r: 4.5, cx: -20, cy: -20 });
    svg.append(this.dot);
  }

  frame(width, height) {
    const { figure } = this;
    const parts = [];
    const xTicks = this.x.ticks(Math.max(2, Math.floor(width / 90)));
    // What is counted has no parts.
    const isCount = !figure.y.unit && figure.curves.every((curve) => curve.y.every((value) => value === null || Number.isInteger(value)));
    const yTicks = this.y.ticks(6).filter((tick) => !isCount || Number.isInteger(tick));
    const xWords = figure.logarithmic ? xTicks.map((tick) => formatValue(tick, figure.x.unit)) : tickWords(xTicks, unitFor(figure.x.unit));
    const yWords = tickWords(yTicks, unitFor(figure.y.unit));
    yTicks.forEach((tick, at) => {
      const y = this.y.at(tick);
      parts.push(shape("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
      parts.push(shape("text", { class: "tick", x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, yWords[at]));
    });
    xTicks.forEach((tick, at) => {
      const x = this.x.at(tick);
      parts.push(shape("line", { class: "grid", x1: x, x2: x, y1: height - MARGIN.bottom, y2: height - MARGIN.bottom + 4 }));
      parts.push(shape("text", { class: "tick", x, y: height - MARGIN.bottom + 17, "text-anchor": "middle" }, xWords[at]));
    });
    parts.push(shape("text", { class: "axis-title", x: 2, y: 11 }, figure.y.title));
    parts.push(shape("text", { class: "axis-title", x: width - MARGIN.right, y: height - 5, "text-anchor": "end" }, figure.x.title));
    return parts;
  }

  line(curve, at) {
    const colour = lineColour(at);
    const points = [];
    for (let point = 0; point < curve.x.length; point += 1) {
      if (curve.x[point] === null || curve.y[point] === null) continue;
      if (this.figure.logarithmic && curve.x[point] <= 0) continue;
      points.push([this.x.at(curve.x[point]), this.y.at(curve.y[point])]);
    }
    if (curve.style === "points" || points.length === 1) {
      return points.map(([x, y]) => shape("circle", { cx: x, cy: y, r: 4.5, fill: colour }));
    }
    let path = "";
    points.forEach(([x, y], place) => {
      if (!place) path = `M${x.toFixed(1)} ${y.toFixed(1)}`;
      else if (curve.style === "steps") path += `H${x.toFixed(1)}V${y.toFixed(1)}`;
      else path += `L${x.toFixed(1)} ${y.toFixed(1)}`;
    });
    return [shape("path", { d: path, fill: "none", stroke: colour, "stroke-width": 2, "stroke-dasharray": dashOf(curve, at), "stroke-linejoin": "round" })];
  }

  nearest(x, y) {
    let best = null;
    this.figure.curves.forEach((curve, at) => {
      for (let point = 0; point < curve.x.length; point += 1) {
        if (curve.x[point] === null || curve.y[point] === null) continue;
        const distance = Math.abs(this.x.at(curve.x[point]) - x) + Math.abs(this.y.at(curve.y[point]) - y) / 3;
        if (best === null || distance < best.distance) best = { at, point, distance };
      }
    });
    return best;
  }

  pointWords(at, point) {
    const { curves, x, y } = this.figure;
    const curve = curves[at];
    return [curve.name, `${y.title}: ${formatValue(curve.y[point], y.unit)}`, `${x.title}: ${formatValue(curve.x[point], x.unit)}`];
  }

  pointAt(found) {
    if (!this.dot) return;
    this.dot.setAttribute("cx", found ? this.x.at(this.figure.curves[found.at].x[found.point]) : -20);
    this.dot.setAttribute("cy", found ? this.y.at(this.figure.curves[found.at].y[found.point]) : -20);
  }

  hover(event) {
    if (!this.x) return;
    const box = this.svg.getBoundingClientRect();
    const found = this.nearest(event.clientX - box.left, event.clientY - box.top);
    this.pointAt(found);
    this.tell(found ? this.figure.curves[found.at].x[found.point] : null);
    if (found) this.page.tip.show(this.pointWords(found.at, found.point), event.clientX, event.clientY);
  }

  key_down(event) {
    const walk = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!walk && !turn) return;
    event.preventDefault();
    const { curves } = this.figure;
    this.at = ((this.at || 0) + (turn || 0) + curves.length) % curves.length;
    const last = curves[this.at].x.length - 1;
    this.chosen = Math.min(Math.max(this.chosen + (walk || 0), 0), last);
    this.pointAt({ at: this.at, point: this.chosen });
    this.page.tip.say(this.pointWords(this.at, this.chosen).join(", "));
  }
}
