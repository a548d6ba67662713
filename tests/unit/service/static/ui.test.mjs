// What the page's modules compute without a browser, by node's own test runner.

import assert from "node:assert/strict";
import { test } from "node:test";

const at = (name) => new URL(name, `file://${process.env.PARTITA_STATIC}/`).href;
const { follow, searchOf, valuesOf } = await import(at("api.js"));
const { draggedTo, withEdit } = await import(at("edit.js"));
const { withChosen } = await import(at("view_model.js"));
const { ago, noteClocks } = await import(at("view_live.js"));

test("an address says what was asked, several values of one name too", () => {
  const values = { model: "gpt-small", cluster: "hosts:\n  - a&b=c", edits: ["cut:0=3", "device:1=host0/gpu0"], empty: "" };
  const { empty, ...rest } = values;
  assert.equal(empty, "");
  assert.deepEqual(valuesOf(searchOf(values)), rest);
  assert.equal(searchOf({}), "");
});

test("a boundary that is dragged on is one edit, and another boundary is another", () => {
  assert.deepEqual(withEdit([], "cut:0=3"), ["cut:0=3"]);
  assert.deepEqual(withEdit(["cut:0=3"], "cut:0=4"), ["cut:0=4"]);
  assert.deepEqual(withEdit(["cut:0=3"], "cut:1=9"), ["cut:0=3", "cut:1=9"]);
  assert.deepEqual(withEdit(["microbatches=8"], "microbatches=16"), ["microbatches=16"]);
  // Two stages that change places twice are where they were: both exchanges count.
  assert.deepEqual(withEdit(["device:0.0=a"], "device:0.0=b"), ["device:0.0=a", "device:0.0=b"]);
});

test("a boundary stays between its neighbours, wherever it is dragged", () => {
  const stages = [{ ops: 10, end: 10 }, { ops: 5, end: 15 }, { ops: 85, end: 100 }];
  assert.equal(draggedTo(stages, 0, 0.12), 12);
  assert.equal(draggedTo(stages, 0, -3), 1);
  assert.equal(draggedTo(stages, 0, 0.9), 14);
  assert.equal(draggedTo(stages, 1, 0.01), 11);
  assert.equal(draggedTo(stages, 1, 2), 99);
});

test("other clocks and stragglers are noted as they happen", () => {
  const versions = new Map();
  const changes = [];
  const look = (version, stragglers) => noteClocks({ at_s: 0, energy: { jobs: [{ job_id: "j", version, stragglers }] } }, versions, changes);
  assert.equal(look(1, []).length, 0);
  assert.match(look(2, [])[0], /j: clocks of version 2$/);
  assert.match(look(2, [{}])[0], /j: 1 straggler$/);
  assert.match(look(3, [])[0], /no straggler any more$/);
  assert.equal(changes.length, 4);
});

test("a stream that breaks off is asked for until it is back, and a hidden tab holds none", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const streams = [];
  class Stream extends EventTarget {
    constructor(path) {
      super();
      this.path = path;
      streams.push(this);
    }

    close() {
      this.closed = true;
    }
  }
  globalThis.EventSource = Stream;
  globalThis.document = new EventTarget();
  let answers = [{ ok: false, status: 401, json: async () => ({ detail: "open the link" }) }];
  globalThis.fetch = async () => answers.shift() || { ok: true, status: 200, json: async () => ({ at: 2 }) };
  const seen = [];
  const end = follow("/live/events", { live: ({ at }) => seen.push(at), lost: ({ message, status }) => seen.push([message, status]) }, { path: "/live", name: "live" });
  streams[0].dispatchEvent(new MessageEvent("live", { data: '{"at": 1}' }));
  streams[0].dispatchEvent(new Event("error"));
  await new Promise(setImmediate);
  assert.ok(streams[0].closed);
  assert.deepEqual(seen, [1, ["open the link", 401]]);
  context.mock.timers.tick(2000);
  assert.equal(streams.length, 2);
  streams[1].dispatchEvent(new Event("error"));
  await new Promise(setImmediate);
  assert.equal(seen[2], 2); // asked for without a stream
  document.hidden = true;
  document.dispatchEvent(new Event("visibilitychange"));
  context.mock.timers.tick(9000);
  assert.equal(streams.length, 2);
  document.hidden = false;
  document.dispatchEvent(new Event("visibilitychange"));
  assert.equal(streams.length, 3);
  end();
  assert.ok(streams[2].closed);
  document.dispatchEvent(new Event("visibilitychange"));
  assert.equal(streams.length, 3);
});

test("a field offers what its address names, and never another thing without a word", () => {
  const choices = [["gpt-small", "gpt-small"]];
  assert.equal(withChosen(choices, "gpt-small"), choices);
  assert.equal(withChosen(choices, undefined), choices);
  assert.deepEqual(withChosen(choices, "llama3-8b")[1], ["llama3-8b", "llama3-8b"]);
  assert.match(withChosen(choices, "doc:1")[1][1], /not held here any more/);
});

test("how long ago something was is said in few words", () => {
  assert.equal(ago(3.2), "3 s ago");
  assert.equal(ago(-1), "0 s ago");
  assert.equal(ago(600), "10 min ago");
  assert.equal(ago(86400), "24 h ago");
  assert.equal(ago(NaN), "never");
});
