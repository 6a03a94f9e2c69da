import { Chart } from "../components/Chart.tsx";
import { Link } from "../components/Link.tsx";
import { SameExample } from "../components/SameExample.tsx";
import { Empty, Ready, State } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { ofRun, sideOf, withQuery } from "../lib/address.ts";
import { rowsOf } from "../lib/columns.ts";
import { isThere, useData } from "../lib/data.ts";
import { formatNumber } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import { exported, go } from "../lib/router.ts";
import type { ExamplePage } from "../lib/types.ts";
import { visible } from "../lib/visible.ts";

interface Row {
  step: number;
  group_id: string;
  index: number;
  attempt: number;
  status: string;
  reward: number | null;
  num_completion_tokens: number | null;
  newest_version: number | null;
  address: string;
}

export function Example({ address, run }: PageProps) {
  const loaded = useData<ExamplePage>(address, run, ["rollouts", "evals"]);
  return (
    <Ready loaded={loaded}>
      {(data) => {
        const rows = rowsOf<Row>(data.columns as never);
        const steps = data.by_step.columns;
        const [newest, oldest] = [rows[0], rows[rows.length - 1]];
        const [left, right] = [oldest && sideOf(oldest.address), newest && sideOf(newest.address)];
        return (
          <>
            <p class="crumbs">{data.environment}</p>
            <h1>Example {visible(data.example_id)}</h1>
            {left && right && left !== right && isThere(withQuery("/difference", { left, right })) && (
              <p>
                <Link to={withQuery("/difference", { left, right })}>Its first and its newest rollout, as a difference</Link>
              </p>
            )}
            {!exported() && (
              <SameExample run={run} environment={data.environment} example={data.example_id} rollout={newest?.address} />
            )}
            <Chart
              title="Reward over steps: mean, lowest and highest"
              series={[{ name: "mean", xs: steps.step, ys: steps.mean, low: steps.minimum, high: steps.maximum }]}
              onPick={(step) => go(withQuery(ofRun(run, "rollouts"), { step_from: step, step_to: step, example_id: data.example_id }))}
              pickHint="Enter opens its rollouts of the step"
            />
            {data.evals.length > 0 && (
              <>
                <h2>In evals</h2>
                <Table
                  caption="The example in evals"
                  rows={data.evals}
                  keyOf={(row) => row.folder}
                  columns={[
                    { name: "Eval", cell: (row) => <Link to={ofRun(run, "evals", row.folder)}>{row.folder}</Link> },
                    { name: "Version", isNumber: true, cell: (row) => formatNumber(row.version) },
                    { name: "Solved", isNumber: true, cell: (row) => `${row.num_solved} of ${row.rewards.length}` },
                    { name: "Rewards", cell: (row) => row.rewards.map((one) => formatNumber(one, 3)).join(", ") },
                  ]}
                />
              </>
            )}
            <h2>In training</h2>
            {!rows.length && <Empty>It has not been drawn in training.</Empty>}
            {rows.length > 0 && (
              <Table
                caption="Rollouts of the example, newest first"
                rows={rows.slice(0, 500)}
                keyOf={(row) => row.address}
                columns={[
                  { name: "Step", isNumber: true, cell: (row) => formatNumber(row.step) },
                  { name: "Rollout", cell: (row) => <Link to={row.address}>{`${row.group_id} / ${row.index}`}</Link> },
                  { name: "Status", cell: (row) => <State state={row.status} /> },
                  { name: "Reward", isNumber: true, cell: (row) => formatNumber(row.reward) },
                  { name: "Tokens", isNumber: true, cell: (row) => formatNumber(row.num_completion_tokens) },
                  { name: "Version", isNumber: true, cell: (row) => formatNumber(row.newest_version) },
                ]}
              />
            )}
            {rows.length > 500 && <p class="note">The newest 500 of {formatNumber(rows.length)} are shown.</p>}
          </>
        );
      }}
    </Ready>
  );
}
