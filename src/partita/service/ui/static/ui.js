// The page: views by address, each of which can be shared and loaded again.

import { make } from "./report/dom.js";
import { PageState, themeButton } from "./report/page.js";
import { get, searchOf, valuesOf } from "./api.js";
import { modelView } from "./view_model.js";
import { planView } from "./view_plan.js";
import { compareView } from "./view_compare.js";
import { energyView } from "./view_energy.js";
import { fleetView } from "./view_fleet.js";
import { liveView } from "./view_live.js";

const VIEWS = [
  ["model", "Model & cluster", modelView],
  ["plan", "Plan", planView],
  ["compare", "Compare", compareView],
  ["energy", "Energy", energyView],
  ["fleet", "Fleet", fleetView],
  ["live", "Live", liveView],
];

// What all views share: where to go, what figures share, what the forms offer.
class App {
  constructor() {
    this.root = document.getElementById("view");
    this.page = new PageState(document.body);
    this.leaving = [];
    this.last = {};
  }

  async start() {
    this.nav();
    document.getElementById("corner").append(themeButton(this.page));
    this.choices = await get("/choices");
    window.addEventListener("popstate", () => this.show());
    await this.show();
  }

  nav() {
    const links = VIEWS.map(([name, title]) => {
      const link = make("a", { href: `/ui/${name}` }, title);
      link.addEventListener("click", (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        this.go(name, this.last[name] || {});
      });
      return link;
    });
    document.getElementById("views").append(make("b", { class: "brand" }, "partita"), ...links);
    this.links = new Map(VIEWS.map(([name], at) => [name, links[at]]));
  }

  get name() {
    const name = location.pathname.split("/")[2];
    return VIEWS.some(([known]) => known === name) ? name : "model";
  }

  go(name, values) {
    history.pushState(null, "", `/ui/${name}${searchOf(values)}`);
    return this.show();
  }

  // Write what is shown into the address, so that it can be shared.
  address(values, keep = false) {
    const address = `${location.pathname}${searchOf(values)}`;
    this.last[this.name] = values;
    if (keep || address === `${location.pathname}${location.search}`) history.replaceState(null, "", address);
    else history.pushState(null, "", address);
  }

  onLeave(callback) {
    this.leaving.push(callback);
  }

  async show() {
    for (const leave of this.leaving.splice(0)) leave();
    const root = document.documentElement;
    root.removeAttribute("data-ready");
    const { name } = this;
    const [, title, view] = VIEWS.find(([known]) => known === name);
    document.title = `${title} · partita`;
    for (const [each, link] of this.links) {
      if (each === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    // Each view has its own axes and its own listeners.
    this.page.axes.clear();
    this.page.bus.listeners.clear();
    this.page.themed.length = 0;
    this.page.tip.hide();
    const values = valuesOf(location.search);
    this.last[name] = values;
    try {
      await view(this, values);
    } catch (error) {
      this.root.replaceChildren(make("h1", {}, title), make("p", { class: "message", role: "alert" }, error.message));
    }
    root.dataset.ready = name;
  }
}

new App().start().catch((error) => {
  document.getElementById("view").replaceChildren(make("p", { class: "message", role: "alert" }, error.message));
  document.documentElement.dataset.ready = "failed";
});
