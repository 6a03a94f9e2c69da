/** Which rollouts are shown: fields that write to the address of the page. */

import { useState } from "preact/hooks";
import type { RolloutsPage } from "../lib/types.ts";

type Change = (changes: Record<string, string | null>) => void;

interface Props {
  query: URLSearchParams;
  choices: RolloutsPage["choices"];
  onChange: Change;
  /** Of an export, which can answer some of them. */
  isStill: boolean;
}

const CHOSEN = ["environment", "status", "stop_reason", "server"] as const;

export function Filters({ query, choices, onChange, isStill }: Props) {
  return (
    <form class="filters" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
      {!isStill && <Field name="q" label="Text, thoughts, tools" query={query} onChange={onChange} type="search" />}
      <Field name="step_from" label="Step from" query={query} onChange={onChange} type="number" />
      <Field name="step_to" label="to" query={query} onChange={onChange} type="number" />
      <Field name="reward_from" label="Reward from" query={query} onChange={onChange} type="number" />
      <Field name="reward_to" label="to" query={query} onChange={onChange} type="number" />
      {CHOSEN.filter((name) => !isStill || name !== "server").map((name) => (
        <Choice key={name} name={name} values={choices[name] ?? []} query={query} onChange={onChange} />
      ))}
      <Choice name="truncated" values={["true", "false"]} query={query} onChange={onChange} />
      {!isStill && <Choice name="group" values={["mixed", "equal", "signal", "no_signal"]} query={query} onChange={onChange} />}
      {!isStill && <Choice name="attempts" values={["last", "replaced", "all"]} query={query} onChange={onChange} none="last" />}
    </form>
  );
}

interface FieldProps {
  name: string;
  label: string;
  query: URLSearchParams;
  onChange: Change;
  type: "search" | "number";
}

/** A search in conversations, which writes to the address of the page. */
export function TextSearch({ name, query, onChange }: Pick<FieldProps, "name" | "query" | "onChange">) {
  return (
    <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
      <Field name={name} label="Search text, thoughts, tools" query={query} onChange={onChange} type="search" />
    </form>
  );
}

/** Takes effect on Enter and when the field is left, not with every key. */
function Field({ name, label, query, onChange, type }: FieldProps) {
  const value = query.get(name) ?? "";
  const [draft, setDraft] = useState<string | null>(null);
  const apply = () => {
    if (draft !== null && draft !== value) onChange({ [name]: draft || null });
    setDraft(null);
  };
  return (
    <label>
      {label}
      <input
        type={type as "search"}
        step="any"
        value={draft ?? value}
        onInput={(event) => setDraft(event.currentTarget.value)}
        onBlur={apply}
        onKeyDown={(event) => event.key === "Enter" && apply()}
      />
    </label>
  );
}

interface ChoiceProps {
  name: string;
  values: readonly string[];
  query: URLSearchParams;
  onChange: Change;
  none?: string;
}

const LABELS: Record<string, string> = { group: "Rewards in the group", stop_reason: "Stopped by" };

function Choice({ name, values, query, onChange, none = "" }: ChoiceProps) {
  const value = query.get(name) ?? none;
  const all = value && !values.includes(value) ? [value, ...values] : values;
  const label = LABELS[name] ?? name.charAt(0).toUpperCase() + name.slice(1);
  return (
    <label>
      {label}
      <select
        value={value}
        onChange={(event) => onChange({ [name]: event.currentTarget.value === none ? null : event.currentTarget.value })}
      >
        {!none && <option value="">any</option>}
        {all.map((one) => (
          <option key={one} value={one}>
            {one}
          </option>
        ))}
      </select>
    </label>
  );
}

const SHOWN_ELSEWHERE = new Set([
  ...CHOSEN,
  "q", "step_from", "step_to", "reward_from", "reward_to", "truncated", "group", "attempts",
  "sort", "limit", "offset", "cursor", "distribution", "bins",
]);

/** Filters that have no field of their own, each with a button that takes it away. */
export function OtherFilters({ query, onClear }: { query: URLSearchParams; onClear: (name: string, value: string) => void }) {
  const others = [...query].filter(([name]) => !SHOWN_ELSEWHERE.has(name) && !name.startsWith("ui."));
  if (!others.length) return null;
  return (
    <ul class="chosen" aria-label="Further filters">
      {others.map(([name, value]) => (
        <li key={name + value}>
          <button type="button" onClick={() => onClear(name, value)}>
            {name.replaceAll("_", " ")}: {value} <span aria-hidden="true">&times;</span>
            <span class="unseen">(remove)</span>
          </button>
        </li>
      ))}
    </ul>
  );
}
