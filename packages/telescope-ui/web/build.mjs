// Builds the front end into the Python package, where it is kept beside these sources.
//
//   node build.mjs                 writes ../src/telescope_ui/static
//   node build.mjs --out FOLDER    writes there instead
//   node build.mjs --tests         bundles tests/*.test.ts for node's own test runner

import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));
const PAGE = `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<base href="/">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Telescope</title>
<link rel="icon" href="static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="static/app.css">
<script defer src="static/app.js"></script>
</head>
<body>
<div id="app"></div>
<noscript>These pages are drawn by a script. The same data is at ?format=json.</noscript>
</body>
</html>
`;

/** Everything that decides what is built, in a fixed order. */
function sources() {
  const found = ["build.mjs", "package.json", "tsconfig.json"];
  const walk = (folder) => {
    for (const entry of readdirSync(join(HERE, folder), { withFileTypes: true })) {
      const path = `${folder}/${entry.name}`;
      if (entry.isDirectory()) walk(path);
      else found.push(path);
    }
  };
  walk("src");
  return found.sort();
}

/** The digest that tests compare: of each source's path and content, each after its length. */
function digest() {
  const hash = createHash("sha256");
  for (const path of sources()) {
    const content = readFileSync(join(HERE, path));
    hash.update(`${path.length} ${path} ${content.length} `);
    hash.update(content);
  }
  return hash.digest("hex");
}

const common = {
  absWorkingDir: HERE,
  bundle: true,
  charset: "ascii",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "warning",
};

async function buildPages(out) {
  mkdirSync(out, { recursive: true });
  await build({
    ...common,
    banner: {
      js: `/* sources: ${digest()}. Preact: Copyright (c) 2015-present Jason Miller, MIT license. */`,
    },
    define: { "process.env.NODE_ENV": '"production"' },
    entryPoints: { app: "src/main.tsx" },
    format: "iife",
    minify: true,
    outdir: out,
    target: ["chrome109", "firefox115", "safari16"],
  });
  writeFileSync(join(out, "index.html"), PAGE);
  writeFileSync(join(out, "icon.svg"), readFileSync(join(HERE, "src/icon.svg")));
}

async function buildTests() {
  const tests = readdirSync(join(HERE, "tests")).filter((name) => name.endsWith(".test.ts"));
  await build({
    ...common,
    entryPoints: tests.map((name) => `tests/${name}`),
    external: ["node:*"],
    format: "esm",
    outdir: ".tests",
    outExtension: { ".js": ".mjs" },
    platform: "node",
  });
}

const [option, value] = process.argv.slice(2);
if (option === "--tests") await buildTests();
else if (option === "--out" && value) await buildPages(value);
else if (option === undefined) await buildPages(join(HERE, "../src/telescope_ui/static"));
else throw new Error(`expected --out FOLDER or --tests, got ${relative("", option)}`);
