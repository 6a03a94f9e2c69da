/** Whether a run learned, and what is wrong with it: what is read first. */

import { ofRun, withQuery } from "../lib/address.ts";
import type { OverviewPage, RunVerdict } from "../lib/types.ts";
import { Link } from "./Link.tsx";

const TONES: Record<RunVerdict["outcome"], string> = {
  "learned": "good",
  "mixed": "watch",
  "worse": "bad",
  "collapsed": "bad",
  "no gain": "watch",
  "not shown": "none",
  "not trained": "bad",
  "too early": "none",
};

/** The sentence; its beginning up to the colon is what it comes to. */
export function VerdictLine({ verdict }: { verdict: RunVerdict }) {
  const colon = verdict.text.indexOf(": ");
  return (
    <p class={`run-verdict is-${TONES[verdict.outcome]}`}>
      <b>{verdict.text.slice(0, colon + 1)}</b>
      {verdict.text.slice(colon + 1)}
    </p>
  );
}

const SHOWN = 3;

type Diagnosis = OverviewPage["diagnoses"][number];

export function Findings({ run, findings }: { run: string; findings: Diagnosis[] }) {
  if (!findings.length) return null;
  const rest = findings.slice(SHOWN);
  return (
    <section class="findings" aria-label="What is wrong">
      <ul>
        {findings.slice(0, SHOWN).map((one) => (
          <Finding key={keyOf(one)} run={run} one={one} />
        ))}
      </ul>
      {rest.length > 0 && (
        <details>
          <summary>{rest.length} more that {rest.length === 1 ? "is" : "are"} wrong</summary>
          <ul>
            {rest.map((one) => (
              <Finding key={keyOf(one)} run={run} one={one} />
            ))}
          </ul>
        </details>
      )}
    </section>
  );
}

const keyOf = (one: Diagnosis): string => `${one.rule} ${one.environment} ${one.metrics[0]}`;

function Finding({ run, one }: { run: string; one: Diagnosis }) {
  const steps = one.is_over ? `in steps ${one.first_step} to ${one.last_step}` : `since step ${one.first_step}`;
  const query = { ...one.rollouts, environment: one.environment, step_from: one.first_step, step_to: one.last_step };
  const rule = one.environment === null ? one.rule : `${one.rule} in ${one.environment}`;
  return (
    <li>
      <span class={`kind ${one.is_over || one.kind === "slow" ? "faint" : "bad"}`}>{one.kind}</span>{" "}
      <b>{rule}</b> <Link to={withQuery(ofRun(run, "rollouts"), query)}>{steps}</Link>
      {": "}
      {one.cause} <span class="faint">{one.remedy}</span>{" "}
      {one.metrics.length > 0 && <Link to={withQuery(ofRun(run), { metric: one.metrics })}>curves</Link>}
    </li>
  );
}
