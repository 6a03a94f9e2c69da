/** What is known of a run beside its curves: what happened to it, and what it proved before it began. */

import { formatDate, formatNumber } from "../lib/format.ts";
import type { OverviewPage } from "../lib/types.ts";
import { Link } from "./Link.tsx";
import { LongTable } from "./LongTable.tsx";
import { Table } from "./Table.tsx";

export function Happened({ data, address }: { data: OverviewPage; address: string }) {
  const rows = data.happened;
  if (!rows.length) return null;
  return (
    <>
      <h2>What happened</h2>
      <LongTable
        name="happened"
        address={address}
        caption="What happened, newest first"
        rows={rows}
        size={15}
        keyOf={(_, at) => at}
        rowClass={(row) => (["restart", "server", "step"].includes(row.kind) ? "is-trouble" : undefined)}
        columns={[
          { name: "Time", cell: (row) => <span class="number">{formatDate(row.time_s)}</span> },
          { name: "What", cell: (row) => (row.address ? <Link to={row.address}>{row.text}</Link> : row.text) },
          { name: "Why", cell: (row) => row.why },
        ]}
      />
    </>
  );
}

export function SelfTests({ data }: { data: OverviewPage }) {
  if (!data.self_tests.length) return null;
  return (
    <>
      <h2>What the run proved before it began</h2>
      <Table
        caption="Self-tests"
        rows={data.self_tests}
        keyOf={(row) => row.name}
        columns={[
          { name: "Check", cell: (row) => row.name },
          { name: "Value", isNumber: true, cell: (row) => formatNumber(row.value) },
          { name: "Limit", isNumber: true, cell: (row) => formatNumber(row.limit) },
          { name: "Unit", cell: (row) => row.unit },
          { name: "Note", cell: (row) => <span class="faint">{row.note}</span> },
        ]}
      />
    </>
  );
}
