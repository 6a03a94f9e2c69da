/** The same example in another run: chosen here, with a way to lay the newest rollouts side by side. */

import { useState } from "preact/hooks";
import { ofRun, sideOf, withQuery } from "../lib/address.ts";
import { useData } from "../lib/data.ts";
import { formatNumber, plural } from "../lib/format.ts";
import type { ExamplePage, RunsPage } from "../lib/types.ts";
import { Link } from "./Link.tsx";

interface Props {
  run: string;
  environment: string;
  example: string;
  /** Address of the rollout of this run that is compared. */
  rollout: string | undefined;
}

export function SameExample({ run, environment, example, rollout }: Props) {
  const { data } = useData<RunsPage>("/", "", ["runs"]);
  const [chosen, choose] = useState("");
  const others = (data?.runs ?? []).filter((one) => one.key !== run && one.error === null);
  const there = chosen ? ofRun(chosen, "examples", environment, example) : null;
  const { data: found, error } = useData<ExamplePage>(there);
  if (!others.length) return null;
  return (
    <div class="tools">
      <label>
        The same example in
        <select value={chosen} onChange={(event) => choose(event.currentTarget.value)}>
          <option value="">another run</option>
          {others.map((one) => (
            <option key={one.key} value={one.key}>
              {one.name}
            </option>
          ))}
        </select>
      </label>
      {there && error && <span class="faint">it is not in {chosen}</span>}
      {there && !error && found && <Found there={there} found={found} rollout={rollout} />}
    </div>
  );
}

function Found({ there, found, rollout }: { there: string; found: ExamplePage; rollout: string | undefined }) {
  const newest = found.columns.address[0];
  const [left, right] = [rollout && sideOf(rollout), newest && sideOf(newest)];
  const rewards = (found.columns["reward"] ?? []).filter((one): one is number => typeof one === "number");
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  return (
    <>
      <Link to={there}>open it there</Link>
      <span class="faint">
        {plural(found.columns.address.length, "rollout")}, mean reward {formatNumber(mean, 3)}
      </span>
      {left && right && <Link to={withQuery("/difference", { left, right })}>the newest of both, as a difference</Link>}
    </>
  );
}
