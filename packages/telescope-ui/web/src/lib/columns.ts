/** Tables as the server sends them: one list for each column. */

export type Cell = string | number | boolean | null;
export type Columns = Record<string, Cell[]>;

export function numRows(columns: Record<string, readonly unknown[]>): number {
  for (const values of Object.values(columns)) return values.length;
  return 0;
}

/** Return the rows as objects. */
export function rowsOf<T>(columns: { [K in keyof T]: T[K][] }): T[] {
  const names = Object.keys(columns) as (keyof T)[];
  const rows: T[] = [];
  for (let at = 0; at < numRows(columns as Record<string, unknown[]>); at++) {
    const row = {} as T;
    for (const name of names) row[name] = columns[name][at] as T[keyof T];
    rows.push(row);
  }
  return rows;
}
