// Colours that people who see fewer of them can still tell apart, in light and dark.

const NEUTRAL = "#767d90";
const BY_KIND = {
  load: "#8d95a5",
  forward: "#2f74c0",
  recompute: "#86690c",
  backward: "#cf7d22",
  backward_input: "#cf7d22",
  backward_weight: "#3a9e88",
  update: "#a8456f",
  send: NEUTRAL,
  recv: NEUTRAL,
  all_reduce: "#d4504a",
  all_gather: "#d4504a",
  reduce_scatter: "#d4504a",
  all_to_all: "#d4504a",
  broadcast: "#d4504a",
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

// Neighbours are dark and light by turns, and none of the first is a colour of a kind.
const STAGES = [
  "#6f55bd", "#8c9a2a", "#a8447a", "#4ba3a0", "#96602c", "#8f86e0",
  "#4f7a33", "#d0708f", "#3d6f86", "#bd8a3a", "#5b62a8", "#6d8fa3",
];

const LINES = [
  "#2f74c0", "#cf7d22", "#3a9e88", "#a8456f", "#86690c", "#6f55bd",
  "#4ba3a0", "#d4504a", "#4f7a33", "#d0708f", "#3d6f86", "#8d95a5",
];

const CLOCKS = ["#2b4fa8", "#2f86b8", "#3aa58f", "#b5a52c", "#dd8a2e", "#c8403a"];

const PARTS = {
  weights: STAGES[8],
  gradients: STAGES[9],
  master: STAGES[1],
  state: STAGES[0],
  activations: STAGES[3],
  buffers: STAGES[7],
  workspace: STAGES[4],
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

// Return what a kind is in a legend, where kinds of one colour are one.
export function legendWord(name) {
  return BY_KIND[name] === BY_KIND.all_reduce ? "collective" : KIND_WORDS[name];
}

export function kindColour(name) {
  return BY_KIND[name] || NEUTRAL;
}

export function stageColour(stage) {
  return stage < 0 ? NEUTRAL : STAGES[stage % STAGES.length];
}

// Return the colour of a part of a bar; parts that have none of their own get one by place.
export function partColour(name, place) {
  return PARTS[name] || STAGES[place % STAGES.length];
}

export function lineColour(place) {
  return LINES[place % LINES.length];
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
