import { useState } from "preact/hooks";
import type { PageProps } from "../App.tsx";
import { Facts } from "../components/Facts.tsx";
import { Empty, Ready } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { useData } from "../lib/data.ts";
import { formatIso } from "../lib/format.ts";
import type { ConfigPage } from "../lib/types.ts";
import { visible } from "../lib/visible.ts";

export function Config({ address, run }: PageProps) {
  const loaded = useData<ConfigPage>(address, run, ["state"]);
  const [text, setText] = useState("");
  const [onlySet, setOnlySet] = useState(false);
  return (
    <>
      <h1>Config</h1>
      <Ready loaded={loaded}>
        {(data) => {
          const wanted = text.toLowerCase();
          const rows = data.settings.filter(
            (one) => (one.name.toLowerCase().includes(wanted) || shown(one.value).toLowerCase().includes(wanted)) && (!onlySet || one.is_set),
          );
          const knowsSet = data.settings.some((one) => one.is_set !== null);
          return (
            <>
              <Facts
                facts={[
                  ["Host", data.host ?? "-"],
                  ["Python", data.python ?? "-"],
                  ["Platform", data.platform ?? "-"],
                ]}
              />
              <div class="tools">
                <label>
                  Search
                  <input type="search" value={text} onInput={(event) => setText(event.currentTarget.value)} />
                </label>
                {knowsSet && (
                  <label class="check">
                    <input type="checkbox" checked={onlySet} onChange={(event) => setOnlySet(event.currentTarget.checked)} />
                    only what is not as by default
                  </label>
                )}
              </div>
              {rows.length === 0 && <Empty>No setting fits.</Empty>}
              {rows.length > 0 && (
                <Table
                  caption="Settings of the run"
                  rows={rows}
                  keyOf={(row) => row.name}
                  columns={[
                    { name: "Setting", cell: (row) => (row.is_set ? <b class="mono">{row.name}</b> : <code>{row.name}</code>) },
                    { name: "Value", cell: (row) => <pre>{visible(shown(row.value))}</pre> },
                    ...(knowsSet
                      ? [{ name: "Default", cell: (row: (typeof rows)[number]) => <pre class="faint">{row.is_set ? visible(shown(row.default)) : "as it is"}</pre> }]
                      : []),
                  ]}
                />
              )}
              <Versions data={data} />
              {data.resumes.length > 0 && <h2>Resumed</h2>}
              {data.resumes.map((one) => (
                <p key={one.at}>
                  {formatIso(one.at)}: from step {one.step} ({one.checkpoint})
                  {one.changed.length > 0 && `, with ${one.changed.join(", ")} changed`}
                </p>
              ))}
              {Object.keys(data.environments).length > 0 && <h2>Environments</h2>}
              {Object.entries(data.environments).map(([name, record]) => (
                <details key={name}>
                  <summary>{name}</summary>
                  <pre>{visible(JSON.stringify(record, null, 2))}</pre>
                </details>
              ))}
            </>
          );
        }}
      </Ready>
    </>
  );
}

const shown = (value: unknown): string => (typeof value === "string" ? value : JSON.stringify(value) ?? "");

function Versions({ data }: { data: ConfigPage }) {
  const rows = Object.entries(data.versions);
  if (!rows.length) return null;
  return (
    <>
      <h2>Versions</h2>
      <Facts facts={rows} />
    </>
  );
}
