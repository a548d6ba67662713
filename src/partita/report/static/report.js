// A report: one page, from the data that stands in the file.

import { make } from "./dom.js";
import { PageState, showPage, themeButton } from "./page.js";

export async function startReport() {
  const values = JSON.parse(document.getElementById("data").textContent);
  const page = new PageState(document.body);
  const root = document.getElementById("page");
  if (values.title) document.body.prepend(make("div", { class: "corner" }, themeButton(page)));
  await showPage(root, values, page);
  await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  performance.mark("ready");
  document.documentElement.dataset.ready = "true";
}

startReport();
