// Memory of each device over a step, on the axis of the timeline above it.

import { exactSeconds, formatValue } from "./format.js";
import { unpack } from "./store.js";
import { make, oncePerFrame } from "./dom.js";
import { themeOf } from "./colours.js";
import { tableDetails } from "./table.js";
import { cleared, fitted, margins, steer } from "./gantt.js";

const CURVE = 30;
const SPACE = 6;

export class MemoryCurves {
  constructor(figure, page, axis) {
    this.figure = figure;
    this.page = page;
    this.axis = axis;
    const shown = figure.devices.map((device, at) => `${device.name} ${formatValue(figure.peak_bytes[at], "bytes")}`).slice(0, 16);
    this.canvas = make("canvas", { class: "lanes", tabindex: 0, role: "application", "aria-roledescription": "memory over time", "aria-label": `${figure.title}; peaks: ${shown.join(", ")}. Arrows move, plus and minus zoom.` });
    this.element = make("div", { class: "figure-body" }, this.canvas, tableDetails(figure));
    this.redraw = oncePerFrame(() => this.draw());
    this.hand = steer(this.canvas, axis, () => this.left(), () => this.width() - this.left() - this.side());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => {
      axis.point(null);
      page.tip.hide();
    });
    axis.onChange(this.redraw);
    page.onTheme(this.redraw);
    new ResizeObserver(this.redraw).observe(this.canvas);
  }

  async load() {
    const { device, time, bytes } = await unpack(this.figure.data);
    this.time = time;
    this.bytes = bytes;
    this.ranges = this.figure.devices.map(() => [0, 0]);
    let row = 0;
    while (row < device.length) {
      const [own, begin] = [device[row], row];
      while (row < device.length && device[row] === own) row += 1;
      this.ranges[own] = [begin, row];
    }
    this.redraw();
  }

  width() {
    return this.canvas.clientWidth || 800;
  }

  left() {
    return margins(this.width()).left;
  }

  side() {
    return margins(this.width()).right;
  }

  // Return the last point of a device up to a time; -1 = there is none yet.
  pointAt(device, time) {
    let [low, high] = this.ranges[device];
    const begin = low;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.time[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low > begin ? low - 1 : -1;
  }

  draw() {
    if (!this.ranges || !this.canvas.isConnected) return;
    const { figure, axis } = this;
    const width = this.width();
    const [left, room] = [this.left(), this.width() - this.left() - this.side()];
    const theme = themeOf(this.canvas);
    const context = cleared(this.canvas, width, figure.devices.length * (CURVE + SPACE) + 2);
    figure.devices.forEach((device, at) => {
      const top = at * (CURVE + SPACE);
      const limit = figure.limit_bytes[at];
      const most = Math.max(limit || 0, figure.peak_bytes[at], limit ? 0 : Math.max(...figure.peak_bytes)) || 1;
      context.fillStyle = theme.lane;
      context.fillRect(left, top, room, CURVE);
      context.fillStyle = limit !== null && figure.peak_bytes[at] > limit ? theme.alarm : theme.accent;
      this.drawCurve(context, at, { left, top, room, most, axis });
      if (limit !== null && figure.peak_bytes[at] > limit) {
        context.fillStyle = theme.ink;
        context.fillRect(left, top + CURVE * (1 - limit / most), room, 1);
      }
      context.textAlign = "left";
      context.fillStyle = theme.ink;
      context.fillText(fitted(context, device.name, left - 12), 6, top + CURVE / 2);
      context.fillStyle = limit !== null && figure.peak_bytes[at] > limit ? theme.alarm : theme.soft;
      const peak = formatValue(figure.peak_bytes[at], "bytes");
      context.fillText(limit === null || width < 560 ? peak : `${peak} of ${formatValue(limit, "bytes")}`, left + room + 8, top + CURVE / 2);
    });
    if (axis.cursor === null || axis.cursor < axis.from || axis.cursor > axis.to) return;
    context.fillStyle = theme.ink;
    context.globalAlpha = 0.5;
    context.fillRect(left + ((axis.cursor - axis.from) / (axis.to - axis.from)) * room, 0, 1, figure.devices.length * (CURVE + SPACE));
    context.globalAlpha = 1;
  }

  // Draw the most that is held in each pixel.
  drawCurve(context, device, { left, top, room, most, axis }) {
    const [begin, end] = this.ranges[device];
    const step = (axis.to - axis.from) / room;
    let point = this.pointAt(device, axis.from);
    let held = point < begin ? 0 : this.bytes[point];
    point = Math.max(point, begin - 1) + 1;
    for (let x = 0; x < room; x += 1) {
      const until = axis.from + (x + 1) * step;
      let high = held;
      while (point < end && this.time[point] <= until) {
        held = this.bytes[point];
        if (held > high) high = held;
        point += 1;
      }
      const tall = (high / most) * CURVE;
      if (tall > 0) context.fillRect(left + x, top + CURVE - tall, 1, tall);
    }
  }

  hover(event) {
    if (!this.ranges) return;
    const box = this.canvas.getBoundingClientRect();
    const time = this.hand.timeAt(event);
    const device = Math.floor((event.clientY - box.top) / (CURVE + SPACE));
    if (device < 0 || device >= this.figure.devices.length) return;
    const point = this.pointAt(device, time);
    const limit = this.figure.limit_bytes[device];
    const lines = [this.figure.devices[device].name, `${formatValue(point < 0 ? 0 : this.bytes[point], "bytes")} at ${exactSeconds(time)}`];
    lines.push(`peak ${formatValue(this.figure.peak_bytes[device], "bytes")}${limit === null ? "" : ` of ${formatValue(limit, "bytes")}`}`);
    this.axis.point(time);
    this.page.tip.show(lines, event.clientX, event.clientY);
  }
}
