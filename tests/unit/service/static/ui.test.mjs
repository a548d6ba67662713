// What the page's modules compute without a browser, by node's own test runner.

import assert from "node:assert/strict";
import { test } from "node:test";

const at = (name) => new URL(name, `file://${process.env.PARTITA_STATIC}/`).href;
const { searchOf, valuesOf } = await import(at("api.js"));
const { draggedTo, withEdit } = await import(at("edit.js"));
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

test("how long ago something was is said in few words", () => {
  assert.equal(ago(3.2), "3 s ago");
  assert.equal(ago(-1), "0 s ago");
  assert.equal(ago(600), "10 min ago");
  assert.equal(ago(86400), "24 h ago");
  assert.equal(ago(NaN), "never");
});
