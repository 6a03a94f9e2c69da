/** The canvas of the timeline: draws a window, and moves it by wheel, drag, pinch and keys. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { barAt, draw, kept, layout, timeScale, zoomed, type Bar, type Drawn, type View } from "../lib/gantt.ts";
import type { TimelinePage } from "../lib/machineTypes.ts";
import { onCanvas } from "./painters.ts";
import { useWidth } from "./width.ts";

interface Props {
  page: TimelinePage;
  view: View;
  mark: string;
  selected: Bar | null;
  lookOf: Drawn["lookOf"];
  label: string;
  onView: (view: View) => void;
  onSelect: (bar: Bar | null) => void;
}

const MAX_HEIGHT = 640;
const ZOOM = 1.25;

export function Gantt(props: Props) {
  const { page, view, label, onView, onSelect } = props;
  const [box, width] = useWidth<HTMLDivElement>(900);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [scroll, setScroll] = useState(0);
  const [hover, setHover] = useState("");
  const total = layout(page.rows).height + 12;
  const height = Math.min(total, MAX_HEIGHT);
  const drawn: Drawn = { ...props, width, height, scroll };
  const now = useRef(drawn);
  now.current = drawn;

  const paint = () => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context) return;
    const ratio = devicePixelRatio || 1;
    element.width = Math.round(width * ratio);
    element.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(onCanvas(context), now.current);
  };
  useLayoutEffect(paint);
  useEffect(() => {
    addEventListener("telescope-theme", paint);
    return () => removeEventListener("telescope-theme", paint);
  });

  const change = (next: View) => onView(page.extent ? kept(next, page.extent) : next);
  const pan = (part: number) => {
    const by = (view.to - view.from) * part;
    change({ from: view.from + by, to: view.to + by });
  };
  const zoom = (factor: number, pixel = width / 2) => change(zoomed(view, factor, timeScale(view, width).invert(pixel)));

  // A wheel listener of the page itself may not stop the page from scrolling; this one may.
  useEffect(() => {
    const element = canvas.current;
    if (!element) return;
    const onWheel = (event: WheelEvent) => {
      const { view: at, width: wide } = now.current;
      const sideways = event.shiftKey ? event.deltaY : event.deltaX;
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        const factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 120);
        change(zoomed(at, factor, timeScale(at, wide).invert(event.offsetX)));
      } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
        event.preventDefault();
        const by = (sideways / wide) * (at.to - at.from);
        change({ from: at.from + by, to: at.to + by });
      }
    };
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  });

  const onKeyDown = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (key === "w" || key === "+" || key === "=") zoom(1 / ZOOM);
    else if (key === "s" || key === "-") zoom(ZOOM);
    else if (key === "a" || key === "ArrowLeft") pan(-0.15);
    else if (key === "d" || key === "ArrowRight") pan(0.15);
    else if (key === "0" && page.extent) onView(page.extent);
    else if (key === "Escape") onSelect(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const pointers = usePointers(now, change, (x, y) => onSelect(barAt(now.current, x, y)), (x, y) => setHover(hoverText(now.current, x, y)));
  return (
    <div class="timeline" ref={box}>
      <div class="scroll" style={{ height: `${height}px` }} onScroll={(event) => setScroll(event.currentTarget.scrollTop)}>
        <div style={{ height: `${total}px` }}>
          <canvas
            ref={canvas}
            style={{ height: `${height}px`, position: "sticky", top: "0" }}
            tabIndex={0}
            role="img"
            aria-label={label}
            title={hover}
            onKeyDown={onKeyDown}
            {...pointers}
          />
        </div>
      </div>
    </div>
  );
}

function hoverText(drawn: Drawn, x: number, y: number): string {
  const bar = barAt(drawn, x, y);
  if (!bar) return "";
  const { name, duration_s, step } = bar.row.bars.columns;
  const of = step[bar.at] == null ? "" : `, step ${step[bar.at]}`;
  return `${bar.row.label}: ${name[bar.at]}, ${((duration_s[bar.at] ?? 0) * 1000).toFixed(1)} ms${of}`;
}

type At = (x: number, y: number) => void;

/** Drag moves, two fingers zoom, and a press without a move chooses. */
function usePointers(now: { current: Drawn }, change: (view: View) => void, choose: At, hover: At) {
  const held = useRef(new Map<number, number>());
  const moved = useRef(0);
  const onPointerDown = (event: PointerEvent) => {
    (event.currentTarget as HTMLElement).setPointerCapture(event.pointerId);
    held.current.set(event.pointerId, event.offsetX);
    if (held.current.size === 1) moved.current = 0;
  };
  const onPointerMove = (event: PointerEvent) => {
    const before = held.current.get(event.pointerId);
    if (before === undefined) {
      hover(event.offsetX, event.offsetY);
      return;
    }
    const { view, width } = now.current;
    const others = [...held.current].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    moved.current += Math.abs(event.offsetX - before);
    if (others.length === 1) {
      const other = others[0] ?? 0;
      const factor = Math.abs(before - other) / Math.max(8, Math.abs(event.offsetX - other));
      change(zoomed(view, factor, timeScale(view, width).invert(other)));
    } else if (others.length === 0 && moved.current > 3) {
      const by = ((before - event.offsetX) / width) * (view.to - view.from);
      change({ from: view.from + by, to: view.to + by });
    }
    held.current.set(event.pointerId, event.offsetX);
  };
  const onPointerUp = (event: PointerEvent) => {
    if (held.current.size === 1 && moved.current <= 3) choose(event.offsetX, event.offsetY);
    held.current.delete(event.pointerId);
  };
  const onPointerCancel = (event: PointerEvent) => held.current.delete(event.pointerId);
  return { onPointerDown, onPointerMove, onPointerUp, onPointerCancel };
}
