/** The order and the stretch of rows that a table shows. */

export type Key = string | number | boolean | null | undefined;

/** Return the rows in the order of `value`; those without one come last, whichever way it goes. */
export function ordered<Row>(rows: readonly Row[], value: (row: Row) => Key, isDescending: boolean): Row[] {
  const sign = isDescending ? -1 : 1;
  const isMissing = (key: Key) => key === null || key === undefined || key === "" || Number.isNaN(key);
  return [...rows].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (isMissing(one) || isMissing(other)) return Number(isMissing(one)) - Number(isMissing(other));
    if (typeof one === "number" && typeof other === "number") return sign * (one - other);
    return sign * String(one).localeCompare(String(other), "en", { numeric: true });
  });
}

/** Return the page that there is nearest to `asked`, the first being 1, and the rows of it. */
export function paged<Row>(rows: readonly Row[], asked: number, size: number): { page: number; pages: number; rows: Row[] } {
  const pages = Math.max(1, Math.ceil(rows.length / size));
  const page = Math.min(pages, Math.max(1, Math.floor(asked) || 1));
  return { page, pages, rows: rows.slice((page - 1) * size, page * size) };
}
