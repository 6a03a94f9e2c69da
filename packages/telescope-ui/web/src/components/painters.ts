/** The two things that a timeline can be drawn on. */

import type { Painter } from "../lib/gantt.ts";

const FONT = "11px system-ui, sans-serif";

function variables(): (name: string) => string {
  const style = getComputedStyle(document.documentElement);
  const found = new Map<string, string>();
  return (name) => {
    let value = found.get(name);
    if (value === undefined) {
      value = style.getPropertyValue(name).trim() || "#888888";
      found.set(name, value);
    }
    return value;
  };
}

export function onCanvas(context: CanvasRenderingContext2D): Painter {
  const colorOf = variables();
  context.font = FONT;
  return {
    rect(x, y, width, height, color, opacity = 1) {
      context.globalAlpha = opacity;
      context.fillStyle = colorOf(color);
      context.fillRect(x, y, width, height);
      context.globalAlpha = 1;
    },
    text(x, y, text, color, width) {
      context.fillStyle = colorOf(color);
      context.fillText(fitting(context, text, width), x, y);
    },
  };
}

function fitting(context: CanvasRenderingContext2D, text: string, width: number | undefined): string {
  if (width === undefined || context.measureText(text).width <= width) return text;
  let length = Math.floor((text.length * width) / context.measureText(text).width) - 1;
  while (length > 1 && context.measureText(`${text.slice(0, length)}\u2026`).width > width) length--;
  return length > 1 ? `${text.slice(0, length)}\u2026` : "";
}

const escaped = (text: string): string =>
  text.replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`).replace(/[\u0000-\u0008\u000b-\u001f]/g, "?");

export function inSvg(width: number, height: number): Painter & { done: () => string } {
  const colorOf = variables();
  const parts: string[] = [];
  const n = (value: number) => value.toFixed(1);
  return {
    rect(x, y, wide, high, color, opacity = 1) {
      const faint = opacity < 1 ? ` opacity="${opacity}"` : "";
      parts.push(`<rect x="${n(x)}" y="${n(y)}" width="${n(wide)}" height="${n(high)}" fill="${colorOf(color)}"${faint}/>`);
    },
    text(x, y, text, color, room) {
      // About six pixels a letter at this size.
      const shown = room === undefined ? text : text.slice(0, Math.floor(room / 6));
      if (shown) parts.push(`<text x="${n(x)}" y="${n(y)}" fill="${colorOf(color)}">${escaped(shown)}</text>`);
    },
    done: () =>
      `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" font-family="system-ui, sans-serif" font-size="11">${parts.join("")}</svg>`,
  };
}
