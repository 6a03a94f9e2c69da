/** A table of rows; wide ones are scrolled within themselves. */

import type { ComponentChildren } from "preact";

export interface Column<Row> {
  name: string;
  /** What stands in the head, if not the name. */
  label?: ComponentChildren;
  cell: (row: Row, at: number) => ComponentChildren;
  isNumber?: boolean;
  /** The rows can be in the order of this. */
  sort?: string;
}

interface Props<Row> {
  caption: string;
  columns: Column<Row>[];
  rows: Row[];
  keyOf: (row: Row, at: number) => string | number;
  rowClass?: (row: Row) => string | undefined;
  sorted?: string;
  onSort?: (name: string) => void;
}

export function Table<Row>({ caption, columns, rows, keyOf, rowClass, sorted, onSort }: Props<Row>) {
  return (
    <div class="table" tabIndex={0} role="region" aria-label={caption}>
      <table>
        <caption class="unseen">{caption}</caption>
        <thead>
          <tr>
            {columns.map((column) => (
              <Head key={column.name} column={column} sorted={sorted} onSort={onSort} />
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, at) => (
            <tr key={keyOf(row, at)} class={rowClass?.(row)}>
              {columns.map((column) => (
                <td key={column.name} class={column.isNumber ? "number" : undefined}>
                  {column.cell(row, at)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

interface HeadProps<Row> {
  column: Column<Row>;
  sorted?: string | undefined;
  onSort?: ((name: string) => void) | undefined;
}

function Head<Row>({ column, sorted, onSort }: HeadProps<Row>) {
  const label = column.label ?? column.name;
  const kind = column.isNumber ? "number" : undefined;
  const by = column.sort;
  if (!by || !onSort) {
    return (
      <th scope="col" class={kind}>
        {label}
      </th>
    );
  }
  const order = sorted === by ? "ascending" : sorted === `-${by}` ? "descending" : "none";
  return (
    <th scope="col" class={kind} aria-sort={order}>
      <button type="button" class="plain" onClick={() => onSort(order === "descending" ? by : `-${by}`)}>
        {label}
        <span aria-hidden="true">{order === "ascending" ? " \u2191" : order === "descending" ? " \u2193" : ""}</span>
      </button>
    </th>
  );
}
