/** What waits and what plays, step by step, and the processes of environments. */

import { ofRun, withQuery } from "../lib/address.ts";
import { formatByName } from "../lib/format.ts";
import { go } from "../lib/router.ts";
import type { InfraPage } from "../lib/machineTypes.ts";
import type { StepCurves } from "../lib/types.ts";
import { Chart } from "./Chart.tsx";
import { Table } from "./Table.tsx";

export function Queues({ data }: { data: InfraPage }) {
  if (!Object.keys(data.queues.metrics).length) return null;
  return (
    <>
      <h2>Queues of the sampler</h2>
      <p class="note">When the trainer asked for each batch: groups that were finished, rollouts that were played, and those that waited.</p>
      <Curves curves={data.queues} run={data.run.key} prefix="queue/" />
    </>
  );
}

export function Workers({ data }: { data: InfraPage }) {
  const { workers, run } = data;
  if (!workers.length) return null;
  const names = [...new Set(workers.flatMap((one) => Object.keys(one.latest)))];
  return (
    <>
      <h2>Processes of environments</h2>
      <Table
        caption="Processes of environments, at the newest step"
        rows={workers}
        keyOf={(row) => row.environment}
        columns={[
          { name: "Environment", cell: (row) => row.environment },
          ...names.map((name) => ({
            name,
            label: titled(name),
            isNumber: true,
            cell: (row: InfraPage["workers"][number]) => formatByName(name, row.latest[name]),
          })),
        ]}
      />
      {workers.map((one) => (
        <details key={one.environment}>
          <summary>{one.environment}, step by step</summary>
          <Curves curves={one.curves} run={run.key} prefix={`workers/${one.environment}/`} />
        </details>
      ))}
    </>
  );
}

/** The name of a meter in words, without its unit, which its value says. */
const titled = (name: string) => name.replace(/_bytes$|(?<!_per)_s$/, "").replaceAll("_", " ");

function Curves({ curves, run, prefix }: { curves: StepCurves; run: string; prefix: string }) {
  return (
    <div class="charts">
      {Object.entries(curves.metrics).map(([name, ys]) => (
        <Chart
          key={name}
          title={titled(name.startsWith(prefix) ? name.slice(prefix.length) : name)}
          height={150}
          isBytes={name.includes("_bytes")}
          format={(value) => formatByName(name, value)}
          series={[{ name, xs: curves.steps, ys }]}
          onPick={(step) => go(withQuery(ofRun(run, "rollouts"), { step_from: step, step_to: step }))}
          pickHint="Enter opens the rollouts of the step"
        />
      ))}
    </div>
  );
}
