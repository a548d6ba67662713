// A page of figures: the words at its top, its sections, and what figures of one page share.

import { withUnits } from "./format.js";
import { Bus, make } from "./dom.js";
import { Axis } from "./axis.js";
import { Tip } from "./tip.js";
import { tableDetails, tableElement } from "./table.js";
import { Chart, legendOf } from "./chart.js";
import { barsElement } from "./bars.js";
import { clusterElement } from "./cluster.js";
import { GraphStrip } from "./graph.js";
import { Gantt } from "./gantt.js";
import { MemoryCurves } from "./memory.js";
import { ClockSteps } from "./clocks.js";

const PAGE_VERSION = 1;

// What figures of one page share: the tip, axes by name, and news.
export class PageState {
  constructor(root) {
    this.root = root;
    this.tip = new Tip(root);
    this.axes = new Map();
    this.bus = new Bus();
    this.themed = [];
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.themeChanged());
    window.addEventListener("beforeprint", () => this.onPaper(true));
    window.addEventListener("afterprint", () => this.onPaper(false));
  }

  axis(name, length) {
    if (!this.axes.has(name)) this.axes.set(name, new Axis(length));
    this.axes.get(name).extend(length);
    return this.axes.get(name);
  }

  onTheme(listener) {
    this.themed.push(listener);
  }

  themeChanged() {
    for (const listener of this.themed) listener();
  }

  // Paper is light; what is on canvas is drawn anew before the printer takes it.
  onPaper(begins) {
    const { dataset } = document.documentElement;
    if (begins) this.theme = dataset.theme || "";
    const theme = begins ? "light" : this.theme;
    if (theme) dataset.theme = theme;
    else delete dataset.theme;
    this.themeChanged();
    for (const canvas of document.querySelectorAll("canvas.lanes")) canvas.partita.draw();
  }
}

function tableFigure(figure) {
  const rest = tableDetails(figure);
  rest.querySelector("details").remove();
  return make("div", { class: "figure-body" }, tableElement(figure.table, { text: figure.title, hidden: true }), rest);
}

const KINDS = {
  table: (figure) => ({ element: tableFigure(figure) }),
  bars: (figure, page) => ({ element: barsElement(figure, page) }),
  cluster: (figure, page) => ({ element: clusterElement(figure, page) }),
  graph: (figure, page) => new GraphStrip(figure, page),
  chart: (figure, page) => new Chart(figure, page),
  timeline: (figure, page) => new Gantt(figure, page, page.axis(figure.axis, figure.length_s)),
  memory: (figure, page) => new MemoryCurves(figure, page, page.axis(figure.axis, figure.length_s)),
  clocks: (figure, page) => new ClockSteps(figure, page, page.axis(figure.axis, figure.length_s)),
};

// Return an element for a figure, and a promise that it is drawn.
export function figureElement(figure, page, level = "h3") {
  const draw = KINDS[figure.kind];
  if (!draw) return { element: make("p", {}, `figure ${figure.kind} is not known`), done: Promise.resolve() };
  const drawn = draw(figure, page);
  const head = figure.title ? make(level, { class: "title" }, withUnits(figure.title)) : null;
  const note = figure.note ? make("p", { class: "note" }, withUnits(figure.note)) : null;
  const element = make("section", { class: `figure ${figure.kind}` }, head, note, drawn.element);
  return { element, done: drawn.load ? drawn.load() : Promise.resolve(), drawn };
}

// Return one legend for charts of the same lines; null = each has its own.
function sharedLegend(figures, page) {
  const charts = figures.filter((figure) => figure.kind === "chart" && figure.group);
  if (charts.length < 2) return null;
  return legendOf(charts[0], page);
}

function sectionElement(section, page, waits) {
  const legend = sharedLegend(section.figures, page);
  const parts = section.figures.map((figure) => {
    const { element, done } = figureElement(legend ? { ...figure, legend: "above" } : figure, page, section.title ? "h3" : "h2");
    waits.push(done);
    return element;
  });
  const lines = section.words.map((line) => withUnits(line));
  const words = lines.length > 1 ? [make("ul", { class: "words" }, ...lines.map((line) => make("li", {}, line)))] : lines.map((line) => make("p", {}, line));
  return make(
    "section",
    { class: "section" },
    section.title ? make("h2", {}, section.title) : null,
    ...words,
    legend,
    make("div", { class: section.wide ? "figures" : `figures side-by-side${legend ? " charts" : ""}` }, ...parts),
  );
}

// Return a command that can be copied.
export function commandElement(command) {
  const button = make("button", { type: "button", class: "quiet", "aria-label": "copy the command" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "copied";
    } catch {
      button.textContent = "select and copy";
    }
  });
  return make("p", { class: "command" }, make("code", {}, command), button);
}

// Put a page into an element; the promise says that all of it is drawn.
export async function showPage(root, values, page) {
  if (values.version !== PAGE_VERSION) throw new Error(`this page is of version ${values.version}; expected ${PAGE_VERSION}`);
  const waits = [];
  const facts = values.facts.map(([value, label]) => make("div", { class: "fact" }, make("dt", {}, label), make("dd", {}, withUnits(value))));
  const head = !values.title ? null : make(
    "header",
    { class: "head" },
    make("h1", {}, values.title),
    values.subtitle ? make("p", { class: "subtitle" }, values.subtitle) : null,
    values.summary ? make("p", { class: "summary" }, withUnits(values.summary)) : null,
    facts.length ? make("dl", { class: "facts" }, ...facts) : null,
    values.command ? commandElement(values.command) : null,
  );
  const sections = [];
  for (const section of values.sections) {
    const element = sectionElement(section, page, waits);
    // Sections of a few words stand side by side.
    const last = sections[sections.length - 1];
    if (section.figures.length) sections.push(element);
    else if (last && last.classList.contains("spoken")) last.append(element);
    else sections.push(make("div", { class: "side-by-side spoken" }, element));
  }
  const notes = values.notes.length ? make("section", { class: "section notes" }, make("h2", {}, "Assumed and left out"), make("ul", {}, ...values.notes.map((note) => make("li", {}, note)))) : null;
  // From here on a frame covers what is below it.
  document.documentElement.dataset.drawn = "true";
  root.replaceChildren(...[head, ...sections, notes].filter((part) => part));
  await Promise.all(waits);
}

// Return the button that turns between the colours of the system, light and dark.
export function themeButton(page) {
  const button = make("button", { type: "button", class: "quiet theme" }, "colours: system");
  const turns = ["", "light", "dark"];
  button.addEventListener("click", () => {
    const { dataset } = document.documentElement;
    const next = turns[(turns.indexOf(dataset.theme || "") + 1) % turns.length];
    if (next) dataset.theme = next;
    else delete dataset.theme;
    button.textContent = `colours: ${next || "system"}`;
    page.themeChanged();
  });
  return button;
}
