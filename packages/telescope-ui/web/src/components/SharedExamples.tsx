/** Examples that several runs were trained on, those with the largest difference first. */

import { withQuery } from "../lib/address.ts";
import { useData } from "../lib/data.ts";
import { formatNumber, nameOfRun } from "../lib/format.ts";
import type { IndexState, RunOf } from "../lib/types.ts";
import { visible } from "../lib/visible.ts";
import { Link } from "./Link.tsx";
import { Empty, IndexNote, Ready } from "./States.tsx";
import { Table } from "./Table.tsx";

interface CompareExamplesPage {
  runs: RunOf[];
  examples: {
    environment: string;
    example_id: string;
    runs: Record<string, { count: number; mean: number | null; address: string; side: string }>;
  }[];
  index: IndexState;
}

export function SharedExamples({ runs }: { runs: RunOf[] }) {
  const loaded = useData<CompareExamplesPage>(withQuery("/compare/examples", { run: runs.map((one) => one.key) }));
  const [first, second] = runs;
  if (!first || !second) return null;
  return (
    <>
      <h2>Examples of all of them</h2>
      <Ready loaded={loaded}>
        {({ examples, index }) => (
          <>
            <IndexNote index={index} />
            {examples.length === 0 && <Empty>No example was drawn in all of these runs.</Empty>}
            {examples.length > 0 && (
              <Table
                caption="Examples of all of these runs, and their mean rewards"
                rows={examples}
                keyOf={(row) => `${row.environment} ${row.example_id}`}
                columns={[
                  { name: "Environment", cell: (row) => row.environment },
                  { name: "Example", cell: (row) => visible(row.example_id) },
                  ...runs.map((run) => ({
                    name: run.key,
                    label: `${nameOfRun(run)}: mean reward`,
                    isNumber: true,
                    cell: (row: CompareExamplesPage["examples"][number]) => {
                      const side = row.runs[run.key];
                      return side ? <Link to={side.address}>{formatNumber(side.mean, 3)}</Link> : "-";
                    },
                  })),
                  {
                    name: "Newest rollouts",
                    cell: (row) => {
                      const [left, right] = [row.runs[first.key]?.side, row.runs[second.key]?.side];
                      return left && right ? <Link to={withQuery("/difference", { left, right })}>difference</Link> : null;
                    },
                  },
                ]}
              />
            )}
          </>
        )}
      </Ready>
    </>
  );
}
