import { useState } from "preact/hooks";
import { Facts } from "../components/Facts.tsx";
import { Empty, Ready } from "../components/States.tsx";
import { Table } from "../components/Table.tsx";
import { useData } from "../lib/data.ts";
import { formatIso } from "../lib/format.ts";
import type { PageProps } from "../lib/page.ts";
import type { ConfigPage } from "../lib/types.ts";
import { visible } from "../lib/visible.ts";

export function Config({ address, run }: PageProps) {
  const loaded = useData<ConfigPage>(address, run, ["state"]);
  const [text, setText] = useState("");
  const [onlySet, setOnlySet] = useState(false);
  const [onlyOther, setOnlyOther] = useState(false);
  return (
    <>
      <h1>Config</h1>
      <Ready loaded={loaded}>
        {(data) => {
          const wanted = text.toLowerCase();
          const rows = data.settings.filter(
            (one) =>
              (one.name.toLowerCase().includes(wanted) || shown(one.value).toLowerCase().includes(wanted)) &&
              (!onlySet || one.is_set) &&
              (!onlyOther || one.is_default === false),
          );
          const knowsSet = data.settings.some((one) => one.is_set !== null);
          const knowsDefaults = data.settings.some((one) => one.is_default !== null);
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
                    only what was set
                  </label>
                )}
                {knowsDefaults && (
                  <label class="check">
                    <input type="checkbox" checked={onlyOther} onChange={(event) => setOnlyOther(event.currentTarget.checked)} />
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
                    { name: "Setting", cell: (row) => (row.is_set ? <b class="mono breaks">{row.name}</b> : <code class="breaks">{row.name}</code>) },
                    { name: "Value", cell: (row) => <pre>{visible(shown(row.value))}</pre> },
                    ...(knowsDefaults
                      ? [{ name: "Default", cell: (row: Setting) => <pre class="faint">{visible(usual(row))}</pre> }]
                      : []),
                    ...(knowsSet ? [{ name: "From", cell: (row: Setting) => <span class="faint">{origin(row)}</span> }] : []),
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
              <Environments data={data} />
              <ReadFiles data={data} />
            </>
          );
        }}
      </Ready>
    </>
  );
}

type Setting = ConfigPage["settings"][number];

const origin = (one: Setting): string =>
  one.is_set ? "set" : one.is_default ? "default" : "other settings";

function usual(one: Setting): string {
  if (one.is_default) return "as it is";
  return one.default === undefined ? "-" : shown(one.default);
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

/** Which code each environment was: what telescope.lock pins, as the run found it. */
function Environments({ data }: { data: ConfigPage }) {
  const rows = Object.entries(data.environments).map(([name, record]) => ({ name, record }));
  if (!rows.length) return null;
  return (
    <>
      <h2>Environments, as locked</h2>
      <Table
        caption="Environments and what they ran on"
        rows={rows}
        keyOf={(row) => row.name}
        columns={[
          { name: "Environment", cell: ({ name }) => name },
          { name: "Release", cell: ({ record }) => <span class="mono">{`${record.id ?? ""} ${record.version ?? ""}`.trim() || "-"}</span> },
          { name: "Runs in", cell: ({ record }) => PLACES[record.place ?? ""] ?? record.place ?? "-" },
          { name: "From", cell: ({ record }) => <span class="mono">{visible(record.registry ?? "") || "-"}</span> },
          { name: "Wheel (sha256)", cell: ({ record }) => <Digest value={record.wheel_sha256} /> },
          { name: "Lock", cell: ({ record }) => <Digest value={record.lock_digest} /> },
          { name: "Packages", isNumber: true, cell: ({ record }) => record.dependencies?.length ?? 0 },
        ]}
      />
      {rows.map(({ name, record }) =>
        record.dependencies?.length ? (
          <details key={name}>
            <summary>Packages of {name}</summary>
            <ul class="mono packages">
              {record.dependencies.map((one) => (
                <li key={one}>{visible(one)}</li>
              ))}
            </ul>
          </details>
        ) : null,
      )}
    </>
  );
}

/** The files that the run read, by the digests of what was in them. */
function ReadFiles({ data }: { data: ConfigPage }) {
  const rows = [
    ...Object.entries(data.environments).flatMap(([name, record]) =>
      Object.entries(record.files ?? {}).map(([file, digest]) => ({ of: name, file, digest })),
    ),
    ...Object.entries(data.inputs).map(([input, digest]) => {
      const [of, ...file] = input.split(": ");
      return { of: of ?? "", file: file.join(": "), digest };
    }),
  ];
  if (!rows.length) return null;
  return (
    <>
      <h2>Files</h2>
      <Table
        caption="Files that the run read"
        rows={rows}
        keyOf={(row) => `${row.of} ${row.file}`}
        columns={[
          { name: "Of", cell: (row) => <span class="breaks">{visible(row.of)}</span> },
          { name: "File", cell: (row) => <code class="breaks">{visible(row.file)}</code> },
          { name: "Content (sha256, or commit)", cell: (row) => <Digest value={row.digest} /> },
        ]}
      />
    </>
  );
}

const PLACES: Record<string, string> = {
  isolated: "a virtual environment of its own",
  shared: "the Python of the run",
  linked: "the folder of its project",
  importable: "a module",
  elsewhere: "workers elsewhere",
};

/** A digest, of which the beginning tells it from others; all of it is read out and can be copied. */
function Digest({ value }: { value: string | undefined }) {
  if (!value) return <>-</>;
  return (
    <details class="digest">
      <summary class="mono">{value.slice(0, 12)}</summary>
      <code>{value}</code>
    </details>
  );
}
