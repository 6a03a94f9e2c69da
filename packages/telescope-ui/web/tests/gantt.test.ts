import assert from "node:assert/strict";
import { test } from "node:test";
import { looksOf, NUM_COLORS, NUM_PATTERNS } from "../src/lib/colors.ts";
import { barAt, draw, kept, layout, RULER, zoomed, type Drawn, type Painter } from "../src/lib/gantt.ts";
import type { TimelinePage, TimelineRow } from "../src/lib/machineTypes.ts";

function row(source: string, bars: [number, number, number, string][]): TimelineRow {
  return {
    source,
    kind: "rank",
    label: source,
    num_lanes: 2,
    density: null,
    is_too_wide: false,
    bars: {
      columns: {
        start_s: bars.map((one) => one[0]),
        duration_s: bars.map((one) => one[1]),
        lane: bars.map((one) => one[2]),
        name: bars.map((one) => one[3]),
        step: bars.map(() => 1),
        version: bars.map(() => 1),
        note: bars.map(() => ""),
        address: bars.map(() => ""),
      },
    },
  };
}

function drawn(rows: TimelineRow[]): Drawn {
  const page = {
    rows,
    extent: { from: 0, to: 100 },
    from: 0,
    to: 100,
    bucket_s: 1,
    marks: [{ time_s: 50, kind: "restart", label: "", address: "" }],
    steps: { columns: { step: [1], end_s: [30] } },
  } as unknown as TimelinePage;
  const base = { page, view: { from: 0, to: 100 }, width: 1000, height: 300, scroll: 0 };
  return { ...base, mark: "", selected: null, lookOf: () => ({ color: 0, pattern: 0 }) };
}

test("rows do not overlap, and each bar is found where it is drawn", () => {
  const rows = [row("a", [[0, 10, 0, "x"], [2, 3, 1, "inner"]]), row("b", [[50, 1, 0, "y"]])];
  const one = drawn(rows);
  const placed = layout(rows).rows;
  assert.ok((placed[0]?.bottom ?? 0) <= (placed[1]?.top ?? 0));
  assert.ok((placed[0]?.top ?? 0) >= RULER);
  const rects: { x: number; y: number; width: number; height: number }[] = [];
  const painter: Painter = {
    rect: (x, y, width, height, color) => color === "--series-0" && rects.push({ x, y, width, height }),
    text: () => undefined,
  };
  draw(painter, one);
  assert.equal(rects.length, 3);
  const names = rects.map(({ x, y, width, height }) => {
    const bar = barAt(one, x + width / 2, y + height / 2);
    return bar && bar.row.bars.columns.name[bar.at];
  });
  assert.deepEqual(names, ["x", "inner", "y"]);
  assert.equal(barAt(one, 900, (placed[0]?.lanesTop ?? 0) + 2), null);
});

test("what is outside of the window is not drawn", () => {
  const one = drawn([row("a", [[0, 10, 0, "x"]])]);
  one.view = { from: 20, to: 40 };
  let count = 0;
  draw({ rect: (_x, _y, _w, _h, color) => color === "--series-0" && count++, text: () => undefined }, one);
  assert.equal(count, 0);
});

test("a zoom keeps its center and has an end; a window keeps a part of the run", () => {
  const near = zoomed({ from: 0, to: 100 }, 0.5, 25);
  assert.deepEqual(near, { from: 12.5, to: 62.5 });
  let view = { from: 0, to: 100 };
  for (let round = 0; round < 200; round++) view = zoomed(view, 0.5, 30);
  assert.ok(view.to > view.from);
  const away = kept({ from: 500, to: 600 }, { from: 0, to: 100 });
  assert.ok(away.from <= 100 && away.to >= 0);
  const wide = kept({ from: -1000, to: 1000 }, { from: 0, to: 100 });
  assert.ok(wide.to - wide.from <= 120 + 1e-9);
});

test("no two names of a page look alike, and a name looks the same on every page", () => {
  const known = [
    ...["call", "train", "forward", "backward", "environment", "scoring", "evals", "waiting", "drawn", "updating", "lost", "given up"],
    ...["publish weights", "send weights", "stage weights", "wait for rollouts", "credit and packing", "after the step", "starting"],
    ...["optimizer", "gradient norm", "gradient reduction", "metrics", "logprobs", "copy for checkpoint", "write checkpoint", "loading"],
  ];
  const others = ["__proto__", "of mine", "constructor", "judge"];
  const looks = looksOf([...others, ...known]);
  const seen = new Set([...looks.values()].map((look) => JSON.stringify(look)));
  assert.equal(seen.size, known.length + others.length);
  for (const name of known) assert.deepEqual(looksOf([name]).get(name), looks.get(name));
  const many = looksOf(Array.from({ length: 100 }, (_, at) => `name ${at}`));
  assert.equal(new Set([...many.values()].map((look) => JSON.stringify(look))).size, NUM_COLORS * NUM_PATTERNS);
});

test("a pattern is drawn over a bar that is wide enough and has no name on it, and within it", () => {
  for (const pattern of [1, 2, 3]) {
    // Lanes that are too thin for names.
    const thin = { ...row("a", [[10, 20, 0, "x"], [50, 0.2, 0, "x"]]), num_lanes: 20 };
    const one = { ...drawn([thin]), lookOf: () => ({ color: 0, pattern }) };
    const found: [number, number][] = [];
    const bars: [number, number][] = [];
    draw({ rect: (x, _y, width, _h, color) => void (color === "--ground" ? found : bars).push([x, x + width]), text: () => {} }, one);
    const inside = found.slice(1);
    assert.ok(inside.length > 0, String(pattern));
    assert.ok(inside.every(([from, to]) => from >= 100 && to <= 300), String(pattern));
  }
});
