// A frontier to move through: the slider chooses a point, the bars take its times and clocks.

import { formatShare, formatValue } from "./format.js";
import { unpack } from "./store.js";
import { make } from "./dom.js";
import { Gantt } from "./gantt.js";

export class ClockSteps {
  constructor(figure, page, axis) {
    this.figure = figure;
    this.page = page;
    this.gantt = new Gantt(figure, page, axis);
    this.words = make("output", { class: "point-words" });
    this.slider = make("input", { type: "range", min: 0, max: figure.points.length - 1, value: 0, step: 1, "aria-label": "point of the frontier" });
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value)));
    page.bus.on("turn to point", (wanted) => {
      const place = Math.max(0, figure.points.findLastIndex(({ point }) => point <= wanted));
      this.slider.value = place;
      this.show(place);
    });
    this.element = make("div", { class: "figure-body" }, make("label", { class: "slider" }, this.words, this.slider), this.gantt.element);
  }

  async load() {
    await this.gantt.load();
    const columns = await unpack(this.figure.steps);
    const track = this.gantt.tracks[0];
    this.steps = [];
    let before = null;
    for (let place = 0; place < this.figure.points.length; place += 1) {
      const step = {};
      for (const name of ["start", "length", "clock"]) {
        const values = Int32Array.from(columns[`${name} ${place}`]);
        if (before) for (let row = 0; row < values.length; row += 1) values[row] += before[name][row];
        step[name] = values;
      }
      this.steps.push(step);
      before = step;
    }
    track.clocks = this.figure.clocks;
    this.show(0);
  }

  show(place) {
    const point = this.figure.points[place];
    const step = this.steps[place];
    const track = this.gantt.tracks[0];
    track.setTimes(step.start, step.length, this.figure.tick_s);
    track.clock = step.clock;
    track.about.idle = point.idle;
    const sign = point.saving >= 0 ? "less" : "more";
    const words = `point ${point.point}: ${formatValue(point.time_s, "s")} a step, ${formatValue(point.energy_j, "J")}, ${formatShare(Math.abs(point.saving))} ${sign} than with all clocks at their highest`;
    this.words.textContent = words;
    this.slider.setAttribute("aria-valuetext", words);
    this.page.bus.emit("point", { x: point.time_s, y: point.energy_j, point: point.point });
    this.gantt.recolour();
  }
}
