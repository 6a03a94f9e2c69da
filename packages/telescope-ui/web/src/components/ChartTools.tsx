/** How the curves of a page are drawn: smoothing, steps or hours, the axis of values, and the part that is shown. */

import { withQuery } from "../lib/address.ts";
import { exported, go } from "../lib/router.ts";
import { isZoomed, zoomed, type View } from "../lib/view.ts";

interface Props {
  address: string;
  query: URLSearchParams;
  view: View;
  /** Steps of the moving average that are drawn now. */
  smoothSteps: number;
  hasTimes: boolean;
}

const AVERAGES = ["5", "10", "20", "50", "100"];

export function ChartTools({ address, query, view, smoothSteps, hasTimes }: Props) {
  const change = (name: string, value: string) => go(withQuery(address, { [name]: value }), "replace");
  const chosen = query.get("smooth") ?? "";
  const averages = exported() ? [] : AVERAGES;
  return (
    <div class="tools chart-tools">
      <label>
        Smoothing
        <select value={chosen} onChange={(event) => change("smooth", event.currentTarget.value)}>
          <option value="">{chosen === "" ? `usual (${smoothSteps} ${smoothSteps === 1 ? "step" : "steps"})` : "usual"}</option>
          <option value="1">none</option>
          {[...new Set([...averages, ...(chosen && chosen !== "1" ? [chosen] : [])])].map((one) => (
            <option key={one} value={one}>
              {one} steps
            </option>
          ))}
        </select>
      </label>
      <label>
        Over
        <select value={view.isInHours ? "hours" : ""} disabled={!hasTimes} onChange={(event) => change("ui.x", event.currentTarget.value)}>
          <option value="">steps</option>
          <option value="hours">hours</option>
        </select>
      </label>
      <label>
        Scale
        <select
          value={view.scale === "range" ? "" : view.scale}
          onChange={(event) => change("ui.y", event.currentTarget.value)}
        >
          <option value="">whole range</option>
          <option value="fit">what is drawn</option>
          <option value="log">logarithmic</option>
        </select>
      </label>
      {isZoomed(view) ? (
        <button type="button" onClick={() => go(zoomed(address, null))}>
          Steps {view.from ?? "first"} to {view.to ?? "last"}: show all
        </button>
      ) : (
        <span class="faint">Draw over a stretch of a chart to zoom in; a double click shows all again.</span>
      )}
    </div>
  );
}
