/** All metrics in sections, which are folded; what is open is in the address. */

import type { ComponentChildren } from "preact";
import { withQuery } from "../lib/address.ts";
import { plural } from "../lib/format.ts";
import { go } from "../lib/router.ts";
import type { MetricSection } from "../lib/types.ts";

interface Props {
  address: string;
  query: URLSearchParams;
  sections: MetricSection[];
  chart: (name: string) => ComponentChildren;
}

export function Sections({ address, query, sections, chart }: Props) {
  const open = query.getAll("section");
  const toggle = (name: string) => {
    const next = open.includes(name) ? open.filter((one) => one !== name) : [...open, name];
    go(withQuery(address, { section: next }), "replace");
  };
  return (
    <div class="sections">
      {sections.map(({ name, metrics }) => (
        <details key={name} open={open.includes(name)}>
          <summary
            onClick={(event) => {
              event.preventDefault();
              toggle(name);
            }}
          >
            <b>{name}</b> <span class="faint">{plural(metrics.length, "chart")}</span>
          </summary>
          {open.includes(name) && <div class="charts">{metrics.map(chart)}</div>}
        </details>
      ))}
    </div>
  );
}
