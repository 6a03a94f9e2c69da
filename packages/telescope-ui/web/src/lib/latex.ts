/**
 * Formulas as trees of MathML, which browsers draw themselves. A tree has only the elements and
 * attributes that are named here, and text: nothing of a formula is ever read as markup.
 */

export interface MathNode {
  tag: "mrow" | "mi" | "mn" | "mo" | "mtext" | "mfrac" | "msqrt" | "mroot" | "mspace" | "mtable" | "mtr" | "mtd"
    | "msub" | "msup" | "msubsup" | "munder" | "mover" | "munderover";
  text?: string;
  children?: MathNode[];
  attributes?: Record<string, string>;
}

const MAX_TOKENS = 4000;
const MAX_DEPTH = 40;

const LETTERS: Record<string, string> = {
  alpha: "\u03b1", beta: "\u03b2", gamma: "\u03b3", delta: "\u03b4", epsilon: "\u03f5", varepsilon: "\u03b5", zeta: "\u03b6",
  eta: "\u03b7", theta: "\u03b8", vartheta: "\u03d1", iota: "\u03b9", kappa: "\u03ba", lambda: "\u03bb", mu: "\u03bc", nu: "\u03bd",
  xi: "\u03be", pi: "\u03c0", rho: "\u03c1", sigma: "\u03c3", tau: "\u03c4", upsilon: "\u03c5", phi: "\u03d5", varphi: "\u03c6",
  chi: "\u03c7", psi: "\u03c8", omega: "\u03c9", Gamma: "\u0393", Delta: "\u0394", Theta: "\u0398", Lambda: "\u039b", Xi: "\u039e",
  Pi: "\u03a0", Sigma: "\u03a3", Upsilon: "\u03a5", Phi: "\u03a6", Psi: "\u03a8", Omega: "\u03a9", infty: "\u221e", ell: "\u2113",
  emptyset: "\u2205", varnothing: "\u2205", partial: "\u2202", nabla: "\u2207", hbar: "\u210f", Re: "\u211c", Im: "\u2111",
};
const OPERATORS: Record<string, string> = {
  times: "\u00d7", cdot: "\u22c5", div: "\u00f7", pm: "\u00b1", mp: "\u2213", ast: "*", star: "\u22c6", circ: "\u2218", bullet: "\u2219",
  le: "\u2264", leq: "\u2264", leqslant: "\u2264", ge: "\u2265", geq: "\u2265", geqslant: "\u2265", ne: "\u2260", neq: "\u2260",
  approx: "\u2248", equiv: "\u2261", sim: "\u223c", simeq: "\u2243", cong: "\u2245", propto: "\u221d", ll: "\u226a", gg: "\u226b",
  in: "\u2208", notin: "\u2209", ni: "\u220b", subset: "\u2282", subseteq: "\u2286", supset: "\u2283", supseteq: "\u2287",
  cup: "\u222a", cap: "\u2229", setminus: "\u2216", land: "\u2227", wedge: "\u2227", lor: "\u2228", vee: "\u2228", neg: "\u00ac",
  lnot: "\u00ac", forall: "\u2200", exists: "\u2203", to: "\u2192", rightarrow: "\u2192", leftarrow: "\u2190", Rightarrow: "\u21d2",
  implies: "\u27f9", Leftarrow: "\u21d0", iff: "\u27fa", leftrightarrow: "\u2194", Leftrightarrow: "\u21d4", mapsto: "\u21a6",
  longrightarrow: "\u27f6", uparrow: "\u2191", downarrow: "\u2193", perp: "\u22a5", parallel: "\u2225", angle: "\u2220",
  triangle: "\u25b3", mid: "\u2223", nmid: "\u2224", colon: ":", ldots: "\u2026", dots: "\u2026", cdots: "\u22ef", vdots: "\u22ee",
  ddots: "\u22f1", therefore: "\u2234", because: "\u2235", degree: "\u00b0", prime: "\u2032", oplus: "\u2295", otimes: "\u2297",
  lfloor: "\u230a", rfloor: "\u230b", lceil: "\u2308", rceil: "\u2309", langle: "\u27e8", rangle: "\u27e9", lvert: "|", rvert: "|",
  vert: "|", lVert: "\u2016", rVert: "\u2016", Vert: "\u2016", lbrace: "{", rbrace: "}", lbrack: "[", rbrack: "]", backslash: "\\",
  "{": "{", "}": "}", "%": "%", "$": "$", "#": "#", "&": "&", "_": "_", "|": "\u2016",
};
const LARGE: Record<string, string> = {
  sum: "\u2211", prod: "\u220f", coprod: "\u2210", int: "\u222b", iint: "\u222c", oint: "\u222e", bigcup: "\u22c3", bigcap: "\u22c2",
};
const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim limsup liminf max min sup inf gcd lcm det dim ker deg arg mod Pr".split(" "),
);
const LIMITS = new Set(["sum", "prod", "coprod", "bigcup", "bigcap", "lim", "limsup", "liminf", "max", "min", "sup", "inf", "gcd"]);
const ACCENTS: Record<string, string> = {
  bar: "\u00af", overline: "\u00af", hat: "^", widehat: "^", vec: "\u2192", overrightarrow: "\u2192", tilde: "~", widetilde: "~", dot: "\u02d9",
  ddot: "\u00a8",
};
const SPACES: Record<string, string> = {
  ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.25em", "!": "0", quad: "1em", qquad: "2em", enspace: "0.5em", "\\": "1em",
};
const TEXTS = new Set(["text", "textbf", "textit", "textrm", "texttt", "mathrm", "operatorname", "mbox", "mathtt", "mathsf"]);
const BOARD: Record<string, string> = { R: "\u211d", Z: "\u2124", N: "\u2115", Q: "\u211a", C: "\u2102", P: "\u2119", F: "\ud835\udd3d", E: "\ud835\udd3c" };
/** What only says how large something is drawn, or nothing. */
const SILENT = new Set(
  "displaystyle textstyle scriptstyle limits nolimits big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr hline nonumber".split(" "),
);
const FENCES: Record<string, [string, string]> = {
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], Vmatrix: ["\u2016", "\u2016"], Bmatrix: ["{", "}"],
  cases: ["{", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], gathered: ["", ""], array: ["", ""], split: ["", ""],
  "equation": ["", ""], "equation*": ["", ""], smallmatrix: ["", ""],
};

/** A formula that cannot be read. */
class Unreadable extends Error {}

const row = (children: MathNode[], attributes?: Record<string, string>): MathNode =>
  attributes ? { tag: "mrow", children, attributes } : { tag: "mrow", children };
const operator = (text: string, attributes?: Record<string, string>): MathNode =>
  attributes ? { tag: "mo", text, attributes } : { tag: "mo", text };

class Parser {
  private at = 0;
  private depth = 0;

  constructor(private readonly tokens: string[]) {}

  /** All of the formula. */
  whole(): MathNode {
    const found = this.until(() => false);
    if (this.at < this.tokens.length) throw new Unreadable();
    return row(found);
  }

  private peek(): string | undefined {
    return this.tokens[this.at];
  }

  private skipSpace(): void {
    while (/^\s+$/.test(this.peek() ?? "")) this.at++;
  }

  private until(ends: (token: string) => boolean): MathNode[] {
    if (++this.depth > MAX_DEPTH) throw new Unreadable();
    const found: MathNode[] = [];
    for (let token = this.peek(); token !== undefined && !ends(token); token = this.peek()) {
      if (/^\s+$/.test(token)) this.at++;
      else found.push(this.withScripts());
    }
    this.depth--;
    return found;
  }

  private withScripts(): MathNode {
    const name = this.peek() ?? "";
    const isBare = name === "^" || name === "_";
    const base = isBare ? row([]) : this.atom();
    let sub: MathNode | null = null;
    let sup: MathNode | null = null;
    for (;;) {
      this.skipSpace();
      const sign = this.peek();
      if (sign === "^" && !sup) {
        this.at++;
        sup = this.argument();
      } else if (sign === "_" && !sub) {
        this.at++;
        sub = this.argument();
      } else if (sign === "'" && !sup) {
        let primes = "";
        for (; this.peek() === "'"; this.at++) primes += "\u2032";
        sup = operator(primes);
      } else if (sign === "\\limits" || sign === "\\nolimits") this.at++;
      else break;
    }
    const isBelow = LIMITS.has(name.slice(1)) && name.startsWith("\\");
    if (sub && sup) return { tag: isBelow ? "munderover" : "msubsup", children: [base, sub, sup] };
    if (sub) return { tag: isBelow ? "munder" : "msub", children: [base, sub] };
    if (sup) return { tag: isBelow ? "mover" : "msup", children: [base, sup] };
    return base;
  }

  /** What a command applies to: a group, or the next thing. */
  private argument(): MathNode {
    this.skipSpace();
    const token = this.peek();
    if (token === undefined || token === "}" || token === "&" || token === "^" || token === "_") throw new Unreadable();
    if (/^\d/.test(token) && token.length > 1) {
      // x^12 is a 1 above, and then a 2.
      this.tokens.splice(this.at, 1, ...token);
    }
    return this.atom();
  }

  private group(): MathNode[] {
    this.at++;
    const found = this.until((token) => token === "}");
    if (this.peek() !== "}") throw new Unreadable();
    this.at++;
    return found;
  }

  /** The text of a group, as it is written. */
  private words(): string {
    this.skipSpace();
    if (this.peek() !== "{") return this.tokens[this.at++] ?? "";
    let open = 0;
    let text = "";
    do {
      const token = this.tokens[this.at++];
      if (token === undefined) throw new Unreadable();
      if (token === "{") open++;
      if (token === "}") open--;
      if (token !== "{" && token !== "}") text += /^\\[ ,;:!%$#&_{}]$/.test(token) ? token.slice(1) : token;
    } while (open > 0);
    return text;
  }

  private atom(): MathNode {
    const token = this.tokens[this.at] ?? "";
    if (token === "{") return row(this.group());
    if (token === "}" || token === "&") throw new Unreadable();
    this.at++;
    if (token === "~") return { tag: "mspace", attributes: { width: "0.25em" } };
    if (token.startsWith("\\") && token.length > 1) return this.command(token.slice(1));
    if (/^\d/.test(token)) return { tag: "mn", text: token };
    if (/^\p{L}/u.test(token)) return { tag: "mi", text: token };
    return operator(token === "-" ? "\u2212" : token, "()[]|".includes(token) ? { stretchy: "false" } : undefined);
  }

  private command(name: string): MathNode {
    const own = <T>(table: Record<string, T>): T | undefined => (Object.hasOwn(table, name) ? table[name] : undefined);
    const letter = own(LETTERS);
    if (letter) return { tag: "mi", text: letter };
    const sign = own(OPERATORS);
    if (sign) return operator(sign);
    const large = own(LARGE);
    if (large) return operator(large, { largeop: "true" });
    const space = own(SPACES);
    if (space) return { tag: "mspace", attributes: { width: space } };
    const accent = own(ACCENTS);
    if (accent) return { tag: "mover", children: [this.argument(), operator(accent, { stretchy: "true" })], attributes: { accent: "true" } };
    if (FUNCTIONS.has(name)) return { tag: "mi", text: name };
    if (SILENT.has(name)) return row([]);
    if (TEXTS.has(name)) return { tag: "mtext", text: this.words() };
    return this.structure(name);
  }

  private structure(name: string): MathNode {
    if (/^[dtc]?frac$/.test(name)) return { tag: "mfrac", children: [this.argument(), this.argument()] };
    if (/^[dt]?binom$/.test(name)) {
      const fraction: MathNode = { tag: "mfrac", children: [this.argument(), this.argument()], attributes: { linethickness: "0" } };
      return row([operator("("), fraction, operator(")")]);
    }
    if (name === "sqrt") return this.root();
    if (name === "underline") return { tag: "munder", children: [this.argument(), operator("_", { stretchy: "true" })] };
    if (name === "boxed" || name === "fbox") return row([this.argument()], { class: "boxed" });
    if (name === "mathbb") {
      const text = this.words();
      return { tag: "mi", text: Object.hasOwn(BOARD, text) ? (BOARD[text] ?? text) : text };
    }
    if (/^(mathbf|boldsymbol|bm|mathcal|mathit|mathfrak|mathnormal)$/.test(name)) return row([this.argument()], name === "mathbf" ? { class: "bold" } : undefined);
    if (name === "pmod") return row([operator("("), { tag: "mi", text: "mod" }, { tag: "mspace", attributes: { width: "0.3em" } }, this.argument(), operator(")")]);
    if (name === "bmod") return { tag: "mi", text: "mod" };
    if (name === "left") return this.fenced();
    if (name === "begin") return this.environment();
    if (name === "right" || name === "end") throw new Unreadable();
    // One that is not known is shown as it is written.
    return { tag: "mtext", text: `\\${name}` };
  }

  private root(): MathNode {
    this.skipSpace();
    if (this.peek() !== "[") return { tag: "msqrt", children: [this.argument()] };
    this.at++;
    const degree = row(this.until((token) => token === "]"));
    if (this.peek() !== "]") throw new Unreadable();
    this.at++;
    return { tag: "mroot", children: [this.argument(), degree] };
  }

  private delimiter(): MathNode {
    this.skipSpace();
    const token = this.tokens[this.at++];
    if (token === undefined) throw new Unreadable();
    const name = token.slice(1);
    const sign = token === "." ? "" : token.startsWith("\\") && Object.hasOwn(OPERATORS, name) ? (OPERATORS[name] ?? "") : token;
    return operator(sign, { stretchy: "true" });
  }

  private fenced(): MathNode {
    const first = this.delimiter();
    const inner = this.until((token) => token === "\\right");
    if (this.peek() !== "\\right") throw new Unreadable();
    this.at++;
    return row([first, ...inner, this.delimiter()]);
  }

  private environment(): MathNode {
    const name = this.words();
    const fences = Object.hasOwn(FENCES, name) ? FENCES[name] : undefined;
    if (!fences) throw new Unreadable();
    if (name === "array") this.words();
    const lines: MathNode[] = [];
    let cells: MathNode[] = [];
    for (;;) {
      const cell = row(this.until((token) => token === "&" || token === "\\\\" || token === "\\end"));
      cells.push({ tag: "mtd", children: [cell] });
      const token = this.tokens[this.at++];
      if (token === "&") continue;
      if (cells.length > 1 || cell.children?.length) lines.push({ tag: "mtr", children: cells });
      cells = [];
      if (token === "\\\\") continue;
      if (token !== "\\end" || this.words() !== name) throw new Unreadable();
      break;
    }
    const table: MathNode = { tag: "mtable", children: lines };
    const sides = fences.map((one) => (one ? [operator(one, { stretchy: "true" })] : []));
    return row([...(sides[0] ?? []), table, ...(sides[1] ?? [])]);
  }
}

/** Return the formula that `source` describes; null if it cannot be read. */
export function formulaOf(source: string): MathNode | null {
  const tokens = source.match(/\\[a-zA-Z]+|\\[\s\S]|\d+(?:\.\d+)?|\s+|[\s\S]/gu) ?? [];
  if (tokens.length > MAX_TOKENS) return null;
  try {
    return new Parser(tokens).whole();
  } catch (error) {
    if (error instanceof Unreadable) return null;
    throw error;
  }
}
