// Memory of each device over a step, on the axis of the timeline above it.

import { exactSeconds, formatBytes, formatOf, formatShare } from "./format.js";
import { unpack } from "./store.js";
import { make, oncePerFrame } from "./dom.js";
import { themeOf } from "./colours.js";
import { tableDetails } from "./table.js";
import { LANES_SHOWN, cleared, laneName, margins, steer } from "./gantt.js";

const CURVE = 30;
const SPACE = 6;
const METER = 4;

export class MemoryCurves {
  constructor(figure, page, axis) {
    this.figure = figure;
    this.page = page;
    this.axis = axis;
    this.first = 0;
    const shown = figure.devices.map((device, at) => `${device.name} ${formatBytes(figure.peak_bytes[at])}`).slice(0, 16);
    this.canvas = make("canvas", { class: "lanes", tabindex: 0, role: "application", "aria-roledescription": "memory over time", "aria-label": `${figure.title}; peaks: ${shown.join(", ")}. Arrows move, plus and minus zoom.` });
    this.element = make("div", { class: "figure-body" }, this.canvas, tableDetails(figure, () => this.fullTable()));
    this.redraw = oncePerFrame(() => this.draw());
    this.hand = steer(this.canvas, axis, () => this.left(), () => this.width() - this.left() - this.side());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => {
      axis.point(null);
      page.tip.hide();
    });
    axis.onChange(this.redraw);
    page.bus.on(`lanes ${figure.axis}`, (first) => {
      this.first = Math.min(Math.max(first, 0), Math.max(0, figure.devices.length - LANES_SHOWN));
      this.redraw();
    });
    page.onTheme(this.redraw);
    new ResizeObserver(this.redraw).observe(this.canvas);
    this.canvas.partita = this;
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

  // Return every point of the curves, for the CSV.
  fullTable() {
    const columns = [{ title: "device", unit: "" }, { title: "time", unit: "s" }, { title: "memory", unit: "bytes" }];
    const rows = this.ranges.flatMap(([begin, end], device) => {
      const { name } = this.figure.devices[device];
      return Array.from({ length: end - begin }, (_, at) => [name, this.time[begin + at], this.bytes[begin + at]]);
    });
    return { columns, rows };
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
    const devices = figure.devices.slice(this.first, this.first + LANES_SHOWN);
    const high = devices.length * (CURVE + SPACE);
    const context = cleared(this.canvas, width, high + 2);
    devices.forEach((device, place) => {
      const at = this.first + place;
      const top = place * (CURVE + SPACE);
      const [peak, limit] = [figure.peak_bytes[at], figure.limit_bytes[at]];
      const over = limit !== null && peak > limit;
      const most = figure.scale_bytes || 1;
      context.fillStyle = theme.lane;
      context.fillRect(left, top, room, CURVE);
      context.fillStyle = over ? theme.alarm : theme.accent;
      this.drawCurve(context, at, { left, top, room, most, axis });
      if (limit !== null && limit <= most) {
        context.fillStyle = theme.ink;
        context.fillRect(left, Math.round(top + CURVE * (1 - limit / most)), room, 1);
      }
      context.textAlign = "left";
      context.fillStyle = theme.ink;
      context.fillText(laneName(context, device, left - 12), 6, top + CURVE / 2);
      context.fillStyle = over ? theme.alarm : theme.soft;
      const words = limit === null || width < 560 ? formatBytes(peak) : formatOf(peak, limit);
      const side = this.side() - 14;
      context.fillText(words, left + room + 8, top + (limit === null ? CURVE / 2 : CURVE / 2 - 5));
      if (limit === null) return;
      context.fillStyle = theme.idle;
      context.fillRect(left + room + 8, top + CURVE - 9, side, METER);
      context.fillStyle = over ? theme.alarm : theme.accent;
      context.fillRect(left + room + 8, top + CURVE - 9, Math.min(1, peak / limit) * side, METER);
    });
    if (axis.cursor === null || axis.cursor < axis.from || axis.cursor > axis.to) return;
    context.fillStyle = theme.ink;
    context.globalAlpha = 0.5;
    context.fillRect(left + ((axis.cursor - axis.from) / (axis.to - axis.from)) * room, 0, 1, high);
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
      if (until - step >= this.figure.length_s) break; // another figure of the axis is longer
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
    const device = this.first + Math.floor((event.clientY - box.top) / (CURVE + SPACE));
    if (device < this.first || device >= Math.min(this.first + LANES_SHOWN, this.figure.devices.length)) return;
    const point = this.pointAt(device, time);
    const limit = this.figure.limit_bytes[device];
    const lines = [this.figure.devices[device].name, `${formatBytes(point < 0 ? 0 : this.bytes[point])} at ${exactSeconds(time)}`];
    const peak = this.figure.peak_bytes[device];
    lines.push(limit === null ? `peak ${formatBytes(peak)}` : `peak ${formatOf(peak, limit)}, ${formatShare(peak / limit)}`);
    this.axis.point(time);
    this.page.tip.show(lines, event.clientX, event.clientY);
  }
}
