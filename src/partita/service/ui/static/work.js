// Work of the server, followed: its steps, the best value over time, stop, cancel, and its figures.

import { make } from "./report/dom.js";
import { Chart } from "./report/chart.js";
import { showPage } from "./report/page.js";
import { formatShare, formatValue } from "./report/format.js";
import { documentAddress, follow, get, post, remove } from "./api.js";
import { button, messagePlace } from "./forms.js";

function searchFigure(job, seconds) {
  const xs = job.points.map(([at]) => at);
  const ys = job.points.map(([, value]) => value);
  const end = Math.max(seconds, xs[xs.length - 1] || 0);
  const unit = job.unit;
  const curves = [{ name: "best plan so far", style: "steps", x: [...xs, end], y: [...ys, ys[ys.length - 1]] }];
  if (job.bound > 0) curves.push({ name: "no plan is below", style: "dashes", x: [0, end], y: [job.bound, job.bound] });
  const columns = [{ title: "seconds of search", unit: "s" }, { title: "value", unit }];
  return { kind: "chart", title: "Best value against time", x: columns[0], y: columns[1], logarithmic: false, from_zero: false, curves, table: { columns, rows: job.points } };
}

// Shows a piece of work while it goes on.
export class WorkPanel {
  constructor(page) {
    this.page = page;
    this.words = make("p", { class: "step-words", role: "status", "aria-live": "polite" });
    this.stop = button("Stop and keep the best", () => post(`/jobs/${this.key}/stop`, {}).catch((error) => this.message.show(error)));
    this.cancel = button("Cancel", () => remove(`/jobs/${this.key}`).catch((error) => this.message.show(error)), { class: "quiet" });
    this.chartPlace = make("div", {});
    this.message = messagePlace();
    this.running = make("section", { class: "under-way", "aria-label": "work under way" }, this.words, this.chartPlace, make("p", { class: "actions" }, this.stop, this.cancel));
    this.element = make("div", {}, this.message.element, this.running);
    this.running.hidden = true;
    this.message.show(null);
  }

  // Ask for work, and return it when it is done; null where another was asked for meanwhile.
  async run(kind, values) {
    this.end();
    const turn = (this.turn = (this.turn || 0) + 1);
    this.message.show(null);
    document.documentElement.dataset.work = "running";
    try {
      const first = await post("/jobs", { kind, values });
      if (turn !== this.turn) return null;
      const job = first.state === "done" ? first : await this.wait(first);
      if (turn !== this.turn || !job) return null;
      if (job.state !== "done") throw new Error(job.error);
      return job;
    } catch (error) {
      if (turn === this.turn) this.message.show(error);
      return null;
    } finally {
      if (turn === this.turn) {
        this.running.hidden = true;
        document.documentElement.dataset.work = "over";
      }
    }
  }

  wait(first) {
    this.key = first.id;
    this.began = performance.now();
    this.running.hidden = false;
    this.stop.hidden = true;
    this.chartPlace.replaceChildren();
    return new Promise((resolve) => {
      this.finish = resolve;
      const state = (job) => {
        this.message.show(null);
        this.show(job);
        if (["done", "failed", "cancelled"].includes(job.state)) this.end(job);
      };
      // Work that a server which was started anew does not know is over; one that is silent may come back.
      const lost = (error) => (error.status ? this.end({ state: "failed", error: error.message }) : this.message.show(error));
      this.close = follow(`/jobs/${first.id}/events`, { state, lost }, { path: `/jobs/${first.id}`, name: "state" });
    });
  }

  end(job = null) {
    if (this.close) this.close();
    this.close = null;
    if (this.finish) this.finish(job);
    this.finish = null;
  }

  show(job) {
    const best = job.points.length ? job.points[job.points.length - 1][1] : null;
    const value = best === null ? "" : ` · best so far ${formatValue(best, job.unit)}`;
    const gap = best !== null && job.gap !== null ? `, at most ${formatShare(job.gap)} above the bound` : "";
    this.words.textContent = `${job.state === "waiting" ? "waits for a process" : job.words || "starts"}${value}${gap}`;
    this.stop.hidden = !job.points.length;
    if (job.points.length) {
      const chart = new Chart(searchFigure(job, (performance.now() - this.began) / 1000), this.page);
      this.chartPlace.replaceChildren(chart.element);
      chart.redraw();
    }
  }
}

// Return who listens now, to be gone back to when figures are replaced by others.
export function listeners(page) {
  return { themed: [...page.themed], bus: [...page.bus.listeners].map(([name, known]) => [name, [...known]]) };
}

// Let figures that came since then listen no more.
export function release(page, kept) {
  page.themed.splice(0, page.themed.length, ...kept.themed);
  page.bus.listeners = new Map(kept.bus.map(([name, known]) => [name, [...known]]));
}

// Return links to the documents that came of a piece of work.
export function documentLinks(documents) {
  const links = Object.values(documents).map((held) => make("a", { class: "file", href: documentAddress(held.id), download: held.name }, `download ${held.title}`));
  return links.length ? make("p", { class: "actions" }, ...links) : null;
}

// Draw the figures of a piece of work below its view.
export async function showFigures(root, job, page) {
  const values = await get(`/jobs/${job.id}/page`);
  await showPage(root, values, page);
  // The view has the one heading of the page; that of its figures is below it.
  const title = root.querySelector("h1");
  title.replaceWith(make("h2", { class: "figure-title" }, ...title.childNodes));
  return values;
}
