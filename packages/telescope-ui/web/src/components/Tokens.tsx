/** A rollout as the trainer sees it: its tokens, colored by what is known of each. */

import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { shadeClass } from "../lib/colors.ts";
import { formatNumber, plural } from "../lib/format.ts";
import { valueRange } from "../lib/scales.ts";
import { levelsOf, meaningOf, mostSurprising, namesOf, scaleOf, valuesOf } from "../lib/shades.ts";
import type { Chain, Tokens as TokensData } from "../lib/types.ts";
import { visible, visibleToken } from "../lib/visible.ts";
import { Facts } from "./Facts.tsx";

/** Tokens that are drawn at once; more of a longer chain come by a button. */
const PAGE = 8000;
const NUM_SURPRISING = 8;

interface Props {
  tokens: TokensData;
  by: string;
  onBy: (name: string) => void;
  /** Whether a scale that may be taken from this rollout is. */
  fits: boolean;
  onFits: (fits: boolean) => void;
}

export function Tokens({ tokens, by, onBy, fits, onFits }: Props) {
  const [number, setNumber] = useState(0);
  const chain = tokens.chains[number] ?? tokens.chains[0];
  if (!chain) return <p class="empty">No tokens are recorded for this rollout.</p>;
  const names = namesOf(chain);
  const name = names.includes(by) ? by : "log-prob";
  return (
    <div>
      <div class="tools">
        <label>
          Color by
          <select value={name} onChange={(event) => onBy(event.currentTarget.value)}>
            {names.map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
        {tokens.chains.length > 1 && (
          <label>
            Branch
            <select value={number} onChange={(event) => setNumber(Number(event.currentTarget.value))}>
              {tokens.chains.map((one, at) => (
                <option key={at} value={at}>
                  {branchName(one, at)}
                </option>
              ))}
            </select>
          </label>
        )}
        {scaleOf(chain, name).canFit && (
          <label class="check">
            <input type="checkbox" checked={fits} onChange={(event) => onFits(event.currentTarget.checked)} />
            scale of this rollout
          </label>
        )}
      </div>
      <Scale chain={chain} name={name} fits={fits} />
      <p class="note">{meaningOf(name).says}</p>
      {tokens.is_cut && <p class="note">The rollout has more tokens than are shown here.</p>}
      <ChainText key={number} chain={chain} name={name} fits={fits} />
    </div>
  );
}

function branchName(chain: Chain, at: number): string {
  const shared = chain.parent === null ? "" : `, shares ${chain.num_shared} with branch ${chain.parent + 1}`;
  return `branch ${at + 1}: ${chain.ids.length} tokens${shared}`;
}

/** Each color that tokens have, with the value that it is for. */
function Scale({ chain, name, fits }: { chain: Chain; name: string; fits: boolean }) {
  const { shade, ends } = meaningOf(name);
  const { levelOf, steps } = scaleOf(chain, name, fits);
  const range = valueRange([valuesOf(chain, name)]);
  return (
    <p class="scale">
      {ends[0]}
      {steps.map((value) => (
        <span key={value}>
          <i class={shadeClass(levelOf(value))} />
          {shade !== "yes" && formatNumber(value, 3)}
        </span>
      ))}
      {ends[1]}
      {range && shade !== "yes" && (
        <span class="faint">
          (here {formatNumber(range[0], 3)} to {formatNumber(range[1], 3)})
        </span>
      )}
    </p>
  );
}

function ChainText({ chain, name, fits }: { chain: Chain; name: string; fits: boolean }) {
  const [shown, setShown] = useState(PAGE);
  const [at, setAt] = useState<number | null>(null);
  const place = useRef<HTMLDivElement>(null);
  const levels = useMemo(() => levelsOf(chain, name, fits), [chain, name, fits]);
  const surprising = useMemo(() => mostSurprising(chain, NUM_SURPRISING), [chain]);
  const count = Math.min(shown, chain.ids.length);
  const goal = useRef<number | null>(null);
  const move = (to: number) => {
    const next = Math.max(0, Math.min(chain.ids.length - 1, to));
    if (next >= count) setShown(Math.ceil((next + 1) / PAGE) * PAGE);
    setAt(next);
    goal.current = next;
  };
  // A token that was not drawn yet can be scrolled to only now.
  useLayoutEffect(() => {
    if (goal.current !== null) place.current?.children[goal.current]?.scrollIntoView({ block: "nearest" });
    goal.current = null;
  });
  const onKeyDown = (event: KeyboardEvent) => {
    const now = at ?? -1;
    if (event.key === "ArrowRight") move(now + 1);
    else if (event.key === "ArrowLeft") move(now - 1);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(chain.ids.length - 1);
    else return;
    event.preventDefault();
  };
  const onOver = (event: Event) => {
    const number = (event.target as HTMLElement).dataset?.["at"];
    if (number !== undefined) setAt(Number(number));
  };
  return (
    <>
      {surprising.length > 0 && (
        <p class="tools surprising">
          <span class="faint">Most surprising:</span>
          {surprising.map((one) => (
            <button type="button" key={one} aria-pressed={one === at} onClick={() => move(one)}>
              <code>{shortToken(chain, one)}</code> {formatNumber(Math.exp(chain.logprobs[one] ?? 0), 2)}
            </button>
          ))}
        </p>
      )}
      <TokenFacts chain={chain} at={at} />
      <div
        ref={place}
        class="tokens mono"
        tabIndex={0}
        role="region"
        aria-label={`${plural(chain.ids.length, "token")}; the arrow keys go from one to the next`}
        onKeyDown={onKeyDown}
        onMouseOver={onOver}
        onClick={onOver}
      >
        {Array.from({ length: count }, (_, number) => (
          <span key={number} data-at={number} class={tokenClass(chain, number, levels[number] ?? null, at === number)}>
            {tokenText(chain, number)}
          </span>
        ))}
      </div>
      {count < chain.ids.length && (
        <button type="button" onClick={() => setShown(shown + PAGE)}>
          Show more of {plural(chain.ids.length - count, "further token")}
        </button>
      )}
    </>
  );
}

function shortToken(chain: Chain, at: number): string {
  return chain.texts ? JSON.stringify(visible(chain.texts[at] ?? "").slice(0, 16)) : String(chain.ids[at]);
}

function tokenText(chain: Chain, at: number): string {
  return chain.texts ? visibleToken(chain.texts[at] ?? "") : `${chain.ids[at]} `;
}

function tokenClass(chain: Chain, at: number, level: number | null, isAt: boolean): string {
  const kind = chain.is_sampled[at] ? "is-sampled" : "is-prompt";
  return `token ${kind}${level === null ? "" : ` ${shadeClass(level)}`}${isAt ? " is-at" : ""}`;
}

function TokenFacts({ chain, at }: { chain: Chain; at: number | null }) {
  if (at === null) {
    return <p class="note">Point at a token, or move with the arrow keys, to see what is known of it.</p>;
  }
  const logprob = chain.logprobs[at] ?? null;
  const turn = chain.turns[at] ?? null;
  return (
    <div role="status">
      <Facts
        facts={[
          ["Token", <code key="text">{JSON.stringify(chain.texts?.[at] ?? "")}</code>],
          ["Id", formatNumber(chain.ids[at])],
          ["Position", formatNumber(at)],
          ["Written by", chain.is_sampled[at] ? `the model, turn ${(turn ?? 0) + 1}` : "the prompt"],
          ["Log-prob", formatNumber(logprob)],
          ["Probability", logprob === null ? "-" : formatNumber(Math.exp(logprob), 3)],
          ...(chain.versions ? [known("Sampled by version", chain.versions[at])] : []),
          ...(chain.mask && chain.is_sampled[at] ? [known("In the loss", chain.mask[at] ? "yes" : "no")] : []),
          ...Object.entries(chain.columns).map(([name, values]) => known(capital(name), values[at])),
        ]}
      />
    </div>
  );
}

function known(name: string, value: number | string | null | undefined): [string, string] {
  return [name, typeof value === "string" ? value : formatNumber(value ?? null)];
}

const capital = (name: string): string => name.charAt(0).toUpperCase() + name.slice(1);
