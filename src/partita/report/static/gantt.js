// Pipelines on canvas: a lane per device, time to the right; measured below predicted.

import { exactSeconds, formatShare, formatValue } from "./format.js";
import { unpack } from "./store.js";
import { make, oncePerFrame } from "./dom.js";
import { KIND_WORDS, clockColour, inkOn, kindColour, legendWord, rgb, stageColour, themeOf } from "./colours.js";
import { roundTicks, secondsUnit, tickWords } from "./axis.js";
import { tableDetails } from "./table.js";
import { typeMarks } from "./cluster.js";
import { TrackRows, writeStrip } from "./lanes.js";

const TOP = 24;
const GAP = 7;
const BAR_HEIGHT = 17;
const OTHER_HEIGHT = 11;
const WIRE = 6;
const BAND = 5;
const MOST_BANDS = 4;
export const LANES_SHOWN = 64;
const FONT = '11.5px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';

// Return the room beside the lanes: names on the left, figures on the right; all figures share it.
export function margins(width) {
  if (width < 560) return { left: 106, right: 54 };
  return width < 900 ? { left: 128, right: 124 } : { left: 152, right: 124 };
}

// Return a text that fits; of a name the end tells more than the beginning.
export function fitted(context, text, room) {
  let shown = text.length > 120 ? `…${text.slice(-120)}` : text;
  while (shown.length > 1 && context.measureText(shown).width > room) shown = `…${shown.slice(2)}`;
  return shown;
}

// Return the name of a lane, with how many devices it stands for.
export function laneName(context, device, room) {
  const count = device.count ? ` ×${device.count.toLocaleString("en")}` : "";
  return `${fitted(context, device.name, room - context.measureText(count).width)}${count}`;
}

// Return the canvas at the resolution of the screen, cleared, with its context.
export function cleared(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  return context;
}

// Move and zoom an axis by wheel, drag, two fingers and keys over an element.
export function steer(canvas, axis, leftOf, widthOf) {
  const timeAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - leftOf()) / widthOf();
    return axis.from + Math.min(Math.max(share, 0), 1) * (axis.to - axis.from);
  };
  canvas.addEventListener("wheel", (event) => {
    // Without the focus the wheel is the page's, or nobody could scroll past a picture.
    if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (sideways) axis.pan(((event.deltaX || event.deltaY) / widthOf()) * (axis.to - axis.from));
    else axis.zoom(Math.exp(Math.min(Math.max(event.deltaY, -200), 200) * 0.002), timeAt(event));
  }, { passive: false });
  const held = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) return;
    const moved = event.clientX - held.get(event.pointerId);
    if (held.size === 2) {
      const [one, two] = [...held.values()];
      const [other] = [...held].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
      const [apart, now] = [Math.abs(one - two), Math.abs(event.clientX - other)];
      if (apart > 8 && now > 8) axis.zoom(apart / now, timeAt({ clientX: (event.clientX + other) / 2 }));
    } else if (moved) axis.pan((-moved / widthOf()) * (axis.to - axis.from));
    held.set(event.pointerId, event.clientX);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => held.delete(event.pointerId));
  canvas.addEventListener("dblclick", () => axis.all());
  canvas.addEventListener("keydown", (event) => {
    const span = axis.to - axis.from;
    const middle = axis.cursor !== null && axis.cursor >= axis.from && axis.cursor <= axis.to ? axis.cursor : axis.from + span / 2;
    const moves = {
      ArrowLeft: () => axis.pan(-span / 8),
      ArrowRight: () => axis.pan(span / 8),
      "+": () => axis.zoom(0.7, middle),
      "=": () => axis.zoom(0.7, middle),
      "-": () => axis.zoom(1 / 0.7, middle),
      Home: () => axis.all(),
    };
    if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    moves[event.key]();
  });
  return { timeAt, isHeld: () => held.size > 0 };
}

export class Gantt {
  constructor(figure, page, axis) {
    this.figure = figure;
    this.page = page;
    this.axis = axis;
    this.mode = figure.colour;
    this.tracks = [];
    this.first = 0;
    this.chosen = null;
    this.lit = null;
    this.marks = typeMarks(figure.devices.map((device) => device.type));
    this.canvas = make("canvas", {
      class: "lanes", tabindex: 0, role: "application", "aria-roledescription": "timeline",
      "aria-label": `${figure.title}: ${figure.devices.length} devices. Left and right arrows move, plus and minus zoom, Home shows all, comma and full stop step through instructions, up and down change the device.`,
    });
    this.strip = document.createElement("canvas");
    this.legend = make("div", { class: "legend" });
    this.element = make("div", { class: "figure-body" }, this.controls(), this.canvas, tableDetails(figure, () => this.fullTable()));
    this.redraw = oncePerFrame(() => this.draw());
    this.hand = steer(this.canvas, axis, () => this.left(), () => this.width() - this.left() - this.right());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    axis.onChange(() => {
      this.redraw();
      if (this.pointer) this.hover(this.pointer);
    });
    page.bus.on("device", (name) => {
      this.lit = name;
      this.redraw();
    });
    page.bus.on(`lanes ${figure.axis}`, (first) => this.turnTo(first));
    page.onTheme(() => this.recolour());
    new ResizeObserver(this.redraw).observe(this.canvas);
    this.canvas.partita = this;
  }

  async load() {
    const tracks = [];
    for (const about of this.figure.tracks) tracks.push(new TrackRows(about, await unpack(about.data), this.figure));
    // All at once: a picture that is drawn meanwhile has either none of it or the whole.
    this.stages = tracks[0].lanes.map((lane) => tracks[0].stagesOf(lane));
    this.tracks = tracks;
    this.recolour();
  }

  // Return every row of the document with its times, for the CSV.
  fullTable() {
    const columns = ["timeline", "row", "device", "kind", "stage", "microbatch", "peer"].map((title) => ({ title, unit: "" }));
    columns.push({ title: "start", unit: "s" }, { title: "end", unit: "s" }, { title: "size", unit: "bytes" }, { title: "clock", unit: "MHz" });
    const rows = [];
    for (const track of this.tracks) {
      for (let row = 0; row < track.rows; row += 1) {
        const peer = track.peer[row] >= 0 ? this.figure.peers[track.peer[row]] : "";
        rows.push([
          track.about.name, track.row[row], this.figure.devices[track.device[row]].name, this.figure.kinds[track.kind[row]],
          track.stage[row], track.microbatch[row], peer, track.from[row], track.to[row], track.about.sizes[track.size[row]], track.clock ? (track.clocks || track.about.clocks)[track.clock[row]] : null,
        ]);
      }
    }
    return { columns, rows };
  }

  controls() {
    const { axis, figure } = this;
    const view = (words, from, to) => {
      const button = make("button", { type: "button" }, words);
      button.addEventListener("click", () => axis.show(from * axis.length, to * axis.length));
      return button;
    };
    const modes = [["kind", "by what is done"], ["stage", "by stage"]];
    if (figure.tracks.some((track) => track.clocks.some((clock) => clock !== null))) modes.push(["clock", "by clock"]);
    const select = make("select", { "aria-label": `${figure.title}: colours` }, ...modes.map(([value, words]) => make("option", { value, selected: value === this.mode }, words)));
    select.addEventListener("change", () => {
      this.mode = select.value;
      this.recolour();
    });
    const hint = make("span", { class: "hint" }, "click, then wheel zooms · drag moves · , . step · Home");
    this.pager = make("span", { class: "pager" });
    // One set of buttons moves all figures of an axis.
    const views = figure.steers ? [view("whole step", 0, 1), view("beginning", 0, 0.12), view("end", 0.88, 1)] : [];
    return make("div", { class: "controls" }, ...views, select, this.legend, this.pager, figure.steers ? hint : null);
  }

  palettes() {
    const { figure } = this;
    const entry = (colour, words) => ({ colour, rgb: rgb(colour), ink: inkOn(colour), words });
    if (this.mode === "kind") {
      return { palette: figure.kinds.map((name) => ({ ...entry(kindColour(name), KIND_WORDS[name]), key: legendWord(name) })), of: (track) => (row) => track.kind[row] };
    }
    if (this.mode === "stage") {
      const palette = Array.from({ length: 13 }, (_, at) => entry(stageColour(at - 1), at ? `stage ${at - 1}` : "no stage"));
      return { palette, of: (track) => (row) => (track.stage[row] < 0 ? 0 : (track.stage[row] % 12) + 1) };
    }
    const clocks = (this.tracks[0] && this.tracks[0].clocks) || figure.tracks[0].clocks;
    const known = clocks.filter((clock) => clock !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const palette = clocks.map((clock) => (clock === null ? entry(kindColour("send"), "no clock") : { ...entry(clockColour((clock - low) / (high - low || 1)), `${clock} MHz`), known: true }));
    return { palette, of: (track) => (row) => track.clock[row] };
  }

  recolour() {
    const { palette, of } = this.palettes();
    for (const track of this.tracks) track.colour(palette, of(track));
    this.showLegend(palette);
    this.redraw();
  }

  showLegend(palette) {
    const used = new Set();
    for (const track of this.tracks) for (let row = 0; row < track.rows; row += 1) used.add(track.colourOf[row]);
    let shown = [...used].sort((one, two) => one - two).map((at) => palette[at]);
    if (this.mode === "clock") shown = shown.filter((each) => each.words !== "no clock"); // else the highest would be left out
    if (this.mode === "clock" && shown.length > 7) {
      const known = shown.filter((each) => each.known);
      // From the lowest clock to the highest, and what has none.
      shown = [0, 1, 2, 3, 4, 5].map((part) => known[Math.round((part * (known.length - 1)) / 5)]).concat(shown.filter((each) => !each.known));
    }
    const words = new Map(shown.filter((each) => each.words !== KIND_WORDS.recv).map((each) => [each.key || each.words, each.colour]));
    this.legend.replaceChildren(...[...words].slice(0, 14).map(([text, colour]) => {
      const sample = make("i", { class: "swatch" });
      sample.style.background = colour;
      return make("span", { class: "key" }, sample, text);
    }));
  }

  width() {
    return this.canvas.clientWidth || 800;
  }

  left() {
    return margins(this.width()).left;
  }

  right() {
    return margins(this.width()).right;
  }

  laneHeight() {
    return this.figure.tracks.length > 1 ? BAR_HEIGHT + OTHER_HEIGHT + 2 * WIRE : BAR_HEIGHT + WIRE;
  }

  shownLanes() {
    const count = this.figure.devices.length;
    return count <= LANES_SHOWN ? [0, count] : [this.first, Math.min(this.first + LANES_SHOWN, count)];
  }

  turnPages() {
    if (this.figure.devices.length <= LANES_SHOWN || this.pager.childElementCount) return;
    this.pages = make("span", {});
    const turn = (by) => this.page.bus.emit(`lanes ${this.figure.axis}`, this.first + by);
    const back = make("button", { type: "button", "aria-label": "devices before" }, "▲");
    const on = make("button", { type: "button", "aria-label": "devices after" }, "▼");
    back.addEventListener("click", () => turn(-LANES_SHOWN));
    on.addEventListener("click", () => turn(LANES_SHOWN));
    this.pager.append(back, this.pages, on);
    this.turnTo(0);
  }

  turnTo(first) {
    const count = this.figure.devices.length;
    this.first = Math.min(Math.max(first, 0), Math.max(0, count - LANES_SHOWN));
    if (this.pages) this.pages.textContent = ` devices ${this.first + 1} to ${Math.min(this.first + LANES_SHOWN, count)} of ${count.toLocaleString("en")} `;
    this.redraw();
  }

  draw() {
    const began = performance.now();
    if (!this.tracks.length || !this.canvas.isConnected) return;
    this.turnPages();
    const [first, last] = this.shownLanes();
    const width = this.width();
    const [left, lane] = [this.left(), this.laneHeight()];
    this.place = { first, last, left, lane, width: width - left - this.right() };
    const context = cleared(this.canvas, width, TOP + (last - first) * (lane + GAP) + 4);
    this.theme = themeOf(this.canvas);
    this.drawAxis(context);
    const ground = rgb(this.theme.lane);
    for (let device = first; device < last; device += 1) this.drawLane(context, device, ground);
    this.drawCursor(context);
    this.drawMs = performance.now() - began;
    this.draws = (this.draws || 0) + 1;
  }

  x(time) {
    const { axis, place } = this;
    return place.left + ((time - axis.from) / (axis.to - axis.from)) * place.width;
  }

  laneTop(device) {
    return TOP + (device - this.place.first) * (this.place.lane + GAP);
  }

  drawAxis(context) {
    const { axis, place, theme } = this;
    const ticks = roundTicks(axis.from, axis.to, Math.max(3, Math.floor(place.width / 110)));
    const words = tickWords(ticks, secondsUnit);
    const high = this.laneTop(place.last) - GAP;
    context.textAlign = "center";
    ticks.forEach((tick, at) => {
      const x = Math.round(this.x(tick)) + 0.5;
      context.fillStyle = theme.line;
      context.fillRect(x - 0.5, TOP - 5, 1, high - TOP + 8);
      context.fillStyle = theme.soft;
      const half = context.measureText(words[at]).width / 2;
      context.fillText(words[at], Math.min(Math.max(x, place.left + half), place.left + place.width - half), 9);
    });
    context.textAlign = "left";
    context.fillStyle = theme.soft;
    context.fillText("idle", place.left + place.width + 8, 9);
  }

  drawLane(context, device, ground) {
    const { place, theme, figure } = this;
    const top = this.laneTop(device);
    const about = figure.devices[device];
    if (this.lit === about.name) {
      context.fillStyle = theme.accent;
      context.fillRect(0, top, 3, place.lane);
    }
    context.textAlign = "left";
    context.fillStyle = theme.ink;
    const mark = this.marks.get(about.type);
    const room = place.left - 12 - BAND - 6 - (mark ? 14 : 0);
    context.fillText(laneName(context, about, room), 6, top + BAR_HEIGHT / 2);
    if (mark) {
      context.fillStyle = theme.soft;
      context.fillText(mark, place.left - 20 - BAND, top + BAR_HEIGHT / 2);
    }
    this.drawBands(context, device, top);
    let y = top;
    this.tracks.forEach((track, at) => {
      const high = at ? OTHER_HEIGHT : BAR_HEIGHT;
      context.fillStyle = theme.lane;
      context.fillRect(place.left, y, place.width, high);
      this.drawCompute(context, track, track.lanes[device], y, high, ground);
      this.drawWires(context, track, track.lanes[device], y + high + 1, WIRE - 2);
      context.textAlign = "left";
      context.fillStyle = at ? theme.soft : theme.ink;
      const idle = formatShare(track.about.idle[device]);
      const named = this.tracks.length > 1 && place.width > 400 ? `${idle} ${track.about.name}` : idle;
      context.fillText(named, place.left + place.width + 8, y + high / 2);
      y += high + WIRE;
    });
  }

  // Beside a lane stand the colours of its stages, as in the cluster and the model above it.
  drawBands(context, device, top) {
    const stages = this.stages[device].slice(0, MOST_BANDS);
    const high = (this.place.lane - WIRE) / Math.max(1, stages.length);
    stages.forEach((stage, at) => {
      context.fillStyle = stageColour(stage);
      context.fillRect(this.place.left - BAND - 4, top + at * high, BAND, high);
    });
  }

  drawCompute(context, track, lane, y, high, ground) {
    const { axis, place } = this;
    const begin = track.firstAfter(axis.from, ...lane.compute);
    const end = Math.min(track.firstAfter(axis.to, begin, lane.compute[1]) + 1, lane.compute[1]);
    const ratio = context.getTransform().a;
    const pixels = Math.round(place.width * ratio);
    if (end - begin > place.width / 3) {
      if (!this.image || this.image.width !== pixels) {
        this.image = new ImageData(pixels, 1);
        this.strip.width = pixels;
        this.strip.height = 1;
        this.stripContext = this.strip.getContext("2d");
      }
      writeStrip(track, lane, axis, this.image.data, 0, pixels, ground);
      this.stripContext.putImageData(this.image, 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(this.strip, 0, 0, pixels, 1, place.left, y, place.width, high);
      return;
    }
    const { palette, colourOf, from, to } = track;
    const edge = place.left + place.width;
    context.textAlign = "center";
    for (let row = begin; row < end; row += 1) {
      const x = Math.max(this.x(from[row]), place.left);
      const wide = Math.min(this.x(to[row]), edge) - x;
      if (wide <= 0) continue;
      const { colour, ink } = palette[colourOf[row]];
      context.fillStyle = colour;
      context.fillRect(x, y, wide > 4 ? wide - 0.75 : Math.max(wide, 0.6), high);
      if (wide > 22 && high >= BAR_HEIGHT && track.microbatch[row] >= 0) {
        context.fillStyle = ink;
        context.fillText(String(track.microbatch[row]), x + wide / 2, y + high / 2 + 0.5);
      }
    }
  }

  // Draw messages and collectives as a thin line; those that touch and look alike are one stroke.
  drawWires(context, track, lane, y, high) {
    const { axis, place } = this;
    const { from, to, kind } = track;
    const [begin, end] = lane.out;
    const scale = place.width / (axis.to - axis.from);
    const shift = place.left - axis.from * scale;
    const edge = place.left + place.width;
    const send = this.figure.kinds.indexOf("send");
    let [left, right, drawn] = [0, -1, -1];
    const stroke = () => {
      if (right <= left) return;
      context.fillStyle = kindColour(this.figure.kinds[drawn]);
      context.fillRect(left, y, right - left, drawn === send ? high : high + 1);
    };
    for (let row = begin; row < end && from[row] <= axis.to; row += 1) {
      if (to[row] < axis.from) continue;
      const until = Math.min(Math.max(to[row] * scale + shift, from[row] * scale + shift + 0.7), edge);
      if (until <= right) continue;
      const x = Math.max(from[row] * scale + shift, place.left, right);
      if (kind[row] !== drawn || x > right + 0.5) {
        stroke();
        left = x;
        drawn = kind[row];
      }
      right = until;
    }
    stroke();
  }

  drawCursor(context) {
    const { axis, place, theme, chosen } = this;
    if (chosen) {
      const high = chosen.at ? OTHER_HEIGHT : BAR_HEIGHT;
      const y = this.laneTop(chosen.device) + (chosen.at ? BAR_HEIGHT + WIRE : 0);
      const track = this.tracks[chosen.at];
      const x = Math.max(this.x(track.from[chosen.row]), place.left);
      const wide = Math.max(2, Math.min(this.x(track.to[chosen.row]), place.left + place.width) - x);
      if (chosen.device >= place.first && chosen.device < place.last && wide > 0) {
        context.strokeStyle = theme.ink;
        context.lineWidth = 2;
        context.strokeRect(x - 1, y - 1, wide + 2, high + 2);
      }
    }
    if (axis.cursor === null || axis.cursor < axis.from || axis.cursor > axis.to) return;
    context.fillStyle = theme.ink;
    context.globalAlpha = 0.5;
    context.fillRect(this.x(axis.cursor), TOP - 4, 1, this.laneTop(place.last) - TOP);
    context.globalAlpha = 1;
  }

  // Return what is at a place of the canvas: a device, a track and a row, or null.
  hit(x, y) {
    const { place, axis } = this;
    if (!place || x < place.left || x > place.left + place.width) return null;
    const lane = Math.floor((y - TOP) / (place.lane + GAP));
    const device = place.first + lane;
    const inside = y - TOP - lane * (place.lane + GAP);
    if (lane < 0 || device >= place.last || inside > place.lane) return null;
    const time = axis.from + ((x - place.left) / place.width) * (axis.to - axis.from);
    const at = inside >= BAR_HEIGHT + WIRE && this.tracks.length > 1 ? 1 : 0;
    const track = this.tracks[at];
    const own = track.lanes[device];
    const below = inside - (at ? BAR_HEIGHT + WIRE : 0) >= (at ? OTHER_HEIGHT : BAR_HEIGHT);
    const row = below ? track.latestAt(own.out, time) : track.computeAt(own, time);
    return { device, at, time, row };
  }

  // Return a row in words.
  words(found) {
    const track = this.tracks[found.at];
    const { row } = found;
    const device = this.figure.devices[found.device].name;
    const where = this.tracks.length > 1 ? `${device} · ${track.about.name}` : device;
    if (row < 0) {
      const wait = track.latestAt(track.lanes[found.device].waits, found.time);
      const lines = ["idle", where, `at ${exactSeconds(found.time)}`];
      if (wait >= 0) lines.push(`waits for ${this.figure.peers[track.peer[wait]]}`);
      return lines;
    }
    const kind = KIND_WORDS[this.figure.kinds[track.kind[row]]];
    const about = [kind];
    if (track.stage[row] >= 0) about.push(`stage ${track.stage[row]}`);
    if (track.microbatch[row] >= 0) about.push(`microbatch ${track.microbatch[row]}`);
    const lines = [about.join(" · "), where];
    lines.push(`${exactSeconds(track.from[row])} to ${exactSeconds(track.to[row])} (${exactSeconds(track.to[row] - track.from[row])})`);
    if (track.peer[row] >= 0) lines.push(`to ${this.figure.peers[track.peer[row]]}`);
    const size = track.about.sizes[track.size[row]];
    if (size > 0) lines.push(formatValue(size, "bytes"));
    const clocks = track.clocks || track.about.clocks;
    if (track.clock && clocks[track.clock[row]] !== null) lines.push(`${clocks[track.clock[row]]} MHz`);
    return lines.map((line) => (line.length > 400 ? `${line.slice(0, 400)}…` : line));
  }

  hover(event) {
    this.pointer = event;
    const box = this.canvas.getBoundingClientRect();
    const found = this.hit(event.clientX - box.left, event.clientY - box.top);
    this.chosen = found && found.row >= 0 ? found : null;
    if (found) this.canvas.dataset.row = found.row < 0 ? "" : this.tracks[found.at].row[found.row];
    else delete this.canvas.dataset.row;
    this.axis.point(found ? found.time : null);
    if (found) this.page.tip.show(this.words(found), event.clientX, event.clientY);
    else this.page.tip.hide();
    this.redraw();
  }

  leave() {
    this.pointer = null;
    this.chosen = null;
    this.axis.point(null);
    this.page.tip.hide();
    this.redraw();
  }

  step(event) {
    const along = { ",": -1, ".": 1 }[event.key];
    const across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!along && !across) return;
    event.preventDefault();
    const last = this.figure.devices.length - 1;
    const now = this.chosen || { device: this.shownLanes()[0], at: 0, row: -1 };
    const device = Math.min(Math.max(now.device + (across || 0), 0), last);
    const track = this.tracks[now.at];
    const [begin, end] = track.lanes[device].compute;
    if (begin === end) return;
    const time = now.row >= 0 ? track.from[now.row] : this.axis.from;
    const start = device === now.device && now.row >= 0 ? now.row : Math.min(track.firstAfter(time, begin, end), end - 1);
    const row = now.row < 0 || across ? start : Math.min(Math.max(start + along, begin), end - 1);
    this.chosen = { device, at: now.at, row, time: track.from[row] };
    this.canvas.dataset.row = track.row[row];
    if (device < this.first || device >= this.first + LANES_SHOWN) this.page.bus.emit(`lanes ${this.figure.axis}`, device - 4);
    const { axis } = this;
    if (track.from[row] < axis.from || track.to[row] > axis.to) axis.pan(track.from[row] - axis.from - (axis.to - axis.from) / 3);
    axis.point(track.from[row]);
    this.page.tip.say(this.words(this.chosen).join(", "));
    this.redraw();
  }
}
