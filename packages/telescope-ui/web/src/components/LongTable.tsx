/** A table of as many rows as there are: ordered by its heads, searched, and shown a page at a time, all in the address. */

import { parseAddress, withQuery } from "../lib/address.ts";
import { formatNumber } from "../lib/format.ts";
import { ordered, paged, type Key } from "../lib/order.ts";
import { go } from "../lib/router.ts";
import { Empty } from "./States.tsx";
import { Table, type Column } from "./Table.tsx";

export interface LongColumn<Row> extends Column<Row> {
  /** What rows are ordered by; without it they cannot be. */
  value?: (row: Row) => Key;
}

interface Props<Row> {
  /** Tells the tables of a page apart in the address; "" for the only one. */
  name: string;
  address: string;
  caption: string;
  columns: LongColumn<Row>[];
  rows: Row[];
  keyOf: (row: Row, at: number) => string | number;
  rowClass?: (row: Row) => string | undefined;
  /** Rows that stand below a row, whatever the order. */
  below?: (row: Row) => Row[];
  /** Text that is searched; without it there is no search field. */
  textOf?: (row: Row) => string;
  /** What that text is, where it is not all that a row shows. */
  searched?: string;
  size?: number;
}

export function LongTable<Row>(props: Props<Row>) {
  const { name, address, caption, columns, rows, keyOf, rowClass, below, textOf, searched = "", size = 50 } = props;
  const prefix = name ? `ui.${name}.` : "ui.";
  const { query } = parseAddress(address);
  const sort = query.get(`${prefix}sort`) ?? "";
  const text = query.get(`${prefix}q`) ?? "";
  // Back leads over pages and orders, and not over each letter of a search.
  const change = (changes: Record<string, string | number | null>, how: "push" | "replace" = "push") =>
    go(withQuery(address, Object.fromEntries(Object.entries(changes).map(([key, value]) => [prefix + key, value]))), how);
  const by = columns.find((one) => one.value && one.name === sort.replace(/^-/, ""));
  const found = textOf && text ? rows.filter((row) => textOf(row).toLowerCase().includes(text.toLowerCase())) : rows;
  const all = by?.value ? ordered(found, by.value, sort.startsWith("-")) : found;
  const shown = paged(all, Number(query.get(`${prefix}page`)), size);
  const first = (shown.page - 1) * size;
  return (
    <>
      {(textOf || shown.pages > 1) && (
        <div class="tools">
          {textOf && (
            <label>
              {`Search ${searched}`.trim()}
              <input type="search" value={text} aria-label={`${`Search ${searched}`.trim()} in: ${caption}`}
                onInput={(event) => change({ q: event.currentTarget.value || null, page: null }, "replace")} />
            </label>
          )}
          {shown.pages > 1 && (
            <span class="pager" role="group" aria-label={`Pages of: ${caption}`}>
              <button type="button" disabled={shown.page === 1} onClick={() => change({ page: shown.page - 1 })}>
                Previous page
              </button>
              <span role="status">
                {formatNumber(first + 1)} to {formatNumber(first + shown.rows.length)} of {formatNumber(all.length)}
              </span>
              <button type="button" disabled={shown.page === shown.pages} onClick={() => change({ page: shown.page + 1 })}>
                Next page
              </button>
            </span>
          )}
        </div>
      )}
      {all.length === 0 && <Empty>Nothing fits this search.</Empty>}
      {all.length > 0 && (
        <Table
          caption={caption}
          columns={columns.map((one) => (one.value ? { ...one, sort: one.name } : one))}
          rows={below ? shown.rows.flatMap((row) => [row, ...below(row)]) : shown.rows}
          keyOf={keyOf}
          {...(rowClass ? { rowClass } : {})}
          sorted={sort}
          onSort={(next) => change({ sort: next, page: null })}
        />
      )}
    </>
  );
}
