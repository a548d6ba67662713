// Colours that people who see fewer of them can still tell apart, in light and dark.

const BY_KIND = {
  load: "#7b5ea7",
  forward: "#2f74c0",
  recompute: "#a8862a",
  backward: "#e0913a",
  backward_input: "#e0913a",
  backward_weight: "#1f8f7a",
  update: "#b3467f",
  send: "#8a919c",
  recv: "#8a919c",
  all_reduce: "#c2452d",
  all_gather: "#c2452d",
  reduce_scatter: "#c2452d",
  all_to_all: "#c2452d",
  broadcast: "#c2452d",
};

export const KIND_WORDS = {
  load: "load",
  forward: "forward",
  recompute: "recompute",
  backward: "backward",
  backward_input: "backward",
  backward_weight: "weight gradient",
  update: "update",
  send: "message",
  recv: "wait for a message",
  all_reduce: "all-reduce",
  all_gather: "all-gather",
  reduce_scatter: "reduce-scatter",
  all_to_all: "all-to-all",
  broadcast: "broadcast",
};

const STAGES = [
  "#2f74c0", "#e0913a", "#1f8f7a", "#c2452d", "#7b5ea7", "#a8862a",
  "#56a8d6", "#b3467f", "#5d7f2c", "#8c5a3c", "#3f5f9e", "#d47a9c",
];

const CLOCKS = ["#2b4fa8", "#2f86b8", "#3aa58f", "#b5a52c", "#dd8a2e", "#c8403a"];

const PARTS = {
  forward: BY_KIND.forward,
  backward: BY_KIND.backward,
  "weight gradient": BY_KIND.backward_weight,
  recompute: BY_KIND.recompute,
  load: BY_KIND.load,
  update: BY_KIND.update,
  "exposed communication": BY_KIND.all_reduce,
  bubble: "idle",
  free: "idle",
};

export function kindColour(name) {
  return BY_KIND[name] || "#8a919c";
}

export function stageColour(stage) {
  return stage < 0 ? "#8a919c" : STAGES[stage % STAGES.length];
}

// Return the colour of a part of a bar; parts that have none of their own get one by place.
export function partColour(name, place) {
  return PARTS[name] || STAGES[place % STAGES.length];
}

export function lineColour(place) {
  return STAGES[place % STAGES.length];
}

export function rgb(colour) {
  const value = parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

// Return a colour between the ends of the scale of clocks; share goes from 0 to 1.
export function clockColour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (CLOCKS.length - 1);
  const low = Math.min(Math.floor(at), CLOCKS.length - 2);
  const [from, to] = [rgb(CLOCKS[low]), rgb(CLOCKS[low + 1])];
  const mixed = from.map((value, part) => Math.round(value + (to[part] - value) * (at - low)));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

function luminance(colour) {
  const parts = rgb(colour).map((value) => {
    const share = value / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
}

// Return black or white, whichever is read better on a colour.
export function inkOn(colour) {
  const light = luminance(colour);
  return 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? "#ffffff" : "#000000";
}

// Return the colours of the page as they are now.
export function themeOf(element) {
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    ink: read("--ink"),
    soft: read("--soft"),
    line: read("--line"),
    lane: read("--lane"),
    paper: read("--paper"),
    accent: read("--accent"),
    alarm: read("--alarm"),
    idle: read("--idle"),
  };
}
