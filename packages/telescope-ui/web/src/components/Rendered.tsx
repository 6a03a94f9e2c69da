/** Text of a model as Markdown, formulas or JSON. It becomes elements and texts, never markup. */

import { createElement, type ComponentChildren, type JSX } from "preact";
import { useMemo } from "preact/hooks";
import { formulaOf, type MathNode } from "../lib/latex.ts";
import { blocksOf, indentedJson, type Block, type Inline } from "../lib/markdown.ts";
import { visible } from "../lib/visible.ts";

/** Characters of a text that is rendered; a longer one is shown as it is. */
const MAX_RENDERED = 100_000;

export function Rendered({ text, isRaw }: { text: string; isRaw: boolean }) {
  const isShort = text.length <= MAX_RENDERED;
  const json = useMemo(() => (isRaw || !isShort ? null : indentedJson(text)), [text, isRaw]);
  const blocks = useMemo(() => (isRaw || !isShort || json !== null ? [] : blocksOf(text)), [text, isRaw, json]);
  if (isRaw || !isShort) return <pre class="text">{visible(text)}</pre>;
  if (json !== null) return <pre class="code">{visible(json)}</pre>;
  return <div class="rendered">{blocks.map(block)}</div>;
}

function block(one: Block, key: number): JSX.Element {
  switch (one.kind) {
    case "paragraph":
      return <p key={key}>{one.children.map(inline)}</p>;
    case "heading":
      // Not a heading of the page.
      return (
        <p key={key} class={`said-heading level-${Math.min(one.level, 4)}`}>
          {one.children.map(inline)}
        </p>
      );
    case "code":
      return (
        <pre key={key} class="code" aria-label={one.language ? `code, ${one.language}` : "code"}>
          {visible(one.text)}
        </pre>
      );
    case "math":
      return <Formula key={key} source={one.text} isDisplay />;
    case "quote":
      return <blockquote key={key}>{one.children.map(block)}</blockquote>;
    case "rule":
      return <hr key={key} />;
    case "list": {
      const items = one.items.map((item, at) => <li key={at}>{item.map(block)}</li>);
      return one.start === null ? (
        <ul key={key}>{items}</ul>
      ) : (
        <ol key={key} start={one.start}>
          {items}
        </ol>
      );
    }
    case "table":
      return (
        <div key={key} class="table said-table">
          <table>
            <thead>
              <tr>
                {one.head.map((cell, at) => (
                  <th key={at} scope="col">
                    {cell.map(inline)}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {one.rows.map((row, at) => (
                <tr key={at}>
                  {row.map((cell, number) => (
                    <td key={number}>{cell.map(inline)}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      );
  }
}

function inline(one: Inline, key: number): ComponentChildren {
  switch (one.kind) {
    case "text":
      return visible(one.text);
    case "code":
      return <code key={key}>{visible(one.text)}</code>;
    case "math":
      return <Formula key={key} source={one.text} isDisplay={one.isDisplay} />;
    case "strong":
      return <strong key={key}>{one.children.map(inline)}</strong>;
    case "em":
      return <em key={key}>{one.children.map(inline)}</em>;
    case "strike":
      return <s key={key}>{one.children.map(inline)}</s>;
  }
}

/** A formula; what is none is shown as it is written. */
function Formula({ source, isDisplay }: { source: string; isDisplay: boolean }) {
  const tree = useMemo(() => formulaOf(source), [source]);
  if (tree === null) return <code>{visible(source)}</code>;
  return (
    <math display={isDisplay ? "block" : "inline"} title={visible(source.trim())}>
      {element(tree, 0)}
    </math>
  );
}

function element({ tag, text, children, attributes }: MathNode, key: number): JSX.Element {
  const inner = text === undefined ? (children ?? []).map(element) : visible(text);
  return createElement(tag, { key, ...attributes }, inner) as JSX.Element;
}
