/** Pictures as files: an SVG with its styles written into it. */

const KEPT = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "opacity",
];

export function svgText(picture: SVGSVGElement): string {
  const copy = picture.cloneNode(true) as SVGSVGElement;
  const originals = [picture, ...picture.querySelectorAll<SVGElement>("*")];
  const copies = [copy, ...copy.querySelectorAll<SVGElement>("*")];
  originals.forEach((original, at) => {
    const style = getComputedStyle(original);
    for (const name of KEPT) copies[at]?.setAttribute(name, style.getPropertyValue(name));
    copies[at]?.removeAttribute("class");
  });
  for (const extra of copy.querySelectorAll("[data-only-screen]")) extra.remove();
  const ground = getComputedStyle(document.documentElement).getPropertyValue("--ground").trim();
  const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ width: "100%", height: "100%", fill: ground })) {
    paper.setAttribute(name, value);
  }
  copy.prepend(paper);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

export function saveText(name: string, text: string, type: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function saveSvg(name: string, picture: SVGSVGElement): void {
  saveText(`${fileName(name)}.svg`, svgText(picture), "image/svg+xml");
}

export const fileName = (name: string): string => name.replace(/[^A-Za-z0-9._-]+/g, "-");
