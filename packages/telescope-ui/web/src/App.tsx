/** The frame of every page: where one is, what else there is, and the page itself. */

import { useEffect, useRef, useState } from "preact/hooks";
import { Keys } from "./components/Keys.tsx";
import { Link } from "./components/Link.tsx";
import { Trouble } from "./components/States.tsx";
import { ofRun, parseAddress, type Address } from "./lib/address.ts";
import { useData, useRunName } from "./lib/data.ts";
import { retry, useConnection } from "./lib/live.ts";
import { exported, href, useAddress } from "./lib/router.ts";
import { useTheme } from "./lib/theme.ts";
import { visible } from "./lib/visible.ts";
import { Compare } from "./pages/Compare.tsx";
import { Config } from "./pages/Config.tsx";
import { Difference } from "./pages/Difference.tsx";
import { Eval } from "./pages/Eval.tsx";
import { Evals } from "./pages/Evals.tsx";
import { Example } from "./pages/Example.tsx";
import { Group } from "./pages/Group.tsx";
import { Infra } from "./pages/Infra.tsx";
import { Logs } from "./pages/Logs.tsx";
import { Overview } from "./pages/Overview.tsx";
import { Rollout } from "./pages/Rollout.tsx";
import { Rollouts } from "./pages/Rollouts.tsx";
import { Runs } from "./pages/Runs.tsx";
import { Timeline } from "./pages/Timeline.tsx";

const OF_RUN: [string, string][] = [
  ["", "Overview"],
  ["rollouts", "Rollouts"],
  ["timeline", "Timeline"],
  ["infra", "Infra"],
  ["evals", "Evals"],
  ["logs", "Logs"],
  ["config", "Config"],
];

function chosen({ parts }: Address) {
  const [first, run, kind, ...rest] = parts;
  if (first === undefined) return Runs;
  if (first === "compare") return Compare;
  if (first === "difference") return Difference;
  if (first === "evals" && run !== undefined) {
    if (kind === "rollouts") return Rollout;
    return kind === "logs" ? Logs : kind === undefined ? Eval : null;
  }
  if (first !== "runs" || run === undefined) return null;
  if (kind === undefined) return Overview;
  if (kind === "rollouts") return rest.length ? Rollout : Rollouts;
  if (kind === "evals" && rest[1] === "rollouts") return Rollout;
  if (kind === "evals") return rest.length ? Eval : Evals;
  const simple = { timeline: Timeline, infra: Infra, logs: Logs, config: Config };
  const below = { groups: Group, examples: Example };
  if (Object.hasOwn(simple, kind) && !rest.length) return simple[kind as keyof typeof simple];
  if (Object.hasOwn(below, kind) && rest.length) return below[kind as keyof typeof below];
  return null;
}

export function App() {
  const address = useAddress();
  const parsed = parseAddress(address);
  const [first, second] = parsed.parts;
  const run = first === "runs" ? (second ?? "") : "";
  /** What is shown is of this run, or of this eval without one. */
  const key = first === "evals" ? (second ?? "") : run;
  const Page = chosen(parsed);
  const main = useRef<HTMLElement>(null);
  const name = useRunName(key);
  useEffect(() => {
    const parts = key ? [name, ...parsed.parts.slice(2)] : parsed.parts;
    document.title = visible([...parts, "Telescope"].join(" - "));
  }, [parsed.path, name]);
  return (
    <>
      <button type="button" class="skip" onClick={() => main.current?.focus()}>
        Skip to the page
      </button>
      <TopBar run={run} address={address} />
      {run && <Pages run={run} parts={parsed.parts} />}
      <Ended />
      <main ref={main} tabIndex={-1}>
        {Page ? (
          <Page key={parsed.path} address={address} parts={parsed.parts} query={parsed.query} run={key} />
        ) : (
          <Nowhere address={address} path={parsed.path} />
        )}
      </main>
      <Keys run={run} />
    </>
  );
}

/** The server has ended, or wants another token: the page is as it was when it was last heard of. */
function Ended() {
  const connection = useConnection();
  const [isTrying, setIsTrying] = useState(false);
  if (exported() || connection === "live" || connection === "starting") return null;
  const tried = () => {
    setIsTrying(true);
    void retry().finally(() => setIsTrying(false));
  };
  return (
    <div class="ended" role="alert">
      <span>
        <b>This page shows an old state</b>
        {connection === "refused"
          ? ": the server was started anew with another token. Run "
          : ": the server has ended, or does not answer. If it has ended, run "}
        <code>telescope ui</code>
        {connection === "refused" ? " and open the address that it prints." : "; this page then goes on by itself."}
      </span>
      <button type="button" onClick={tried} disabled={isTrying}>
        {isTrying ? "Trying" : "Try again"}
      </button>
    </div>
  );
}

/** An address without a page: the server says which are near. */
function Nowhere({ address, path }: { address: string; path: string }) {
  const { error } = useData<unknown>(address, "", []);
  return (
    <>
      <h1>No page</h1>
      <Trouble message={error ? error.message : `There is no page at ${path}.`} />
    </>
  );
}

function TopBar({ run, address }: { run: string; address: string }) {
  const [theme, toggle] = useTheme();
  const name = visible(useRunName(run));
  const isLive = useConnection() === "live";
  const still = exported();
  const json = `${address}${address.includes("?") ? "&" : "?"}format=json`;
  return (
    <header class="bar">
      <Link to="/" class="brand">
        Telescope
      </Link>
      {run && <Link to={ofRun(run)}>{name}</Link>}
      <span class="at-end">
        {still ? (
          <span class="faint">
            exported {still.created_at.slice(0, 16).replace("T", " ")}
            {still.is_complete === false && ", interrupted: some pages are missing"}
          </span>
        ) : (
          <>
            <span class={isLive ? "live is-on" : "live"}>{isLive ? "live" : "not connected"}</span>
            <a href={href(json)} target="_blank" rel="noreferrer">
              JSON
            </a>
          </>
        )}
        <button type="button" onClick={toggle} aria-label={`Use ${theme === "dark" ? "light" : "dark"} colors`}>
          {theme === "dark" ? "Light" : "Dark"}
        </button>
      </span>
    </header>
  );
}

const PARENTS: Record<string, string> = { groups: "rollouts", examples: "rollouts" };

function Pages({ run, parts }: { run: string; parts: string[] }) {
  const kind = parts[2] ?? "";
  const now = PARENTS[kind] ?? kind;
  return (
    <nav class="pages" aria-label="Pages of the run">
      {OF_RUN.map(([name, label]) => (
        <Link key={name} to={name ? ofRun(run, name) : ofRun(run)} current={name === now}>
          {label}
        </Link>
      ))}
    </nav>
  );
}
