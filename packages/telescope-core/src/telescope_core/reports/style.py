"""CSS for report pages and charts, in light and dark mode."""

NUM_COLORS = 6

_LIGHT = (
    "--page:#ffffff;--card:#f7f8fa;--line:#dfe3e8;--text:#1b2129;--soft:#5b6673;--good:#00664a;"
    "--bad:#a33b00;--c0:#0067a8;--c1:#c24e00;--c2:#00805d;--c3:#a8487f;--c4:#7a6a00;--c5:#5b6673"
)
_DARK = (
    "--page:#12161c;--card:#1a2028;--line:#313a45;--text:#e6eaef;--soft:#a2adba;--good:#58d3ad;"
    "--bad:#ffa06b;--c0:#62b8f0;--c1:#f2a35e;--c2:#4fcba4;--c3:#e79fc8;--c4:#e2cf5a;--c5:#a2adba"
)
_COLORS = "".join(
    f".line.c{i}{{stroke:var(--c{i})}}.dot.c{i},.fill.c{i}{{fill:var(--c{i})}}"
    f".whisker.c{i}{{stroke:var(--c{i})}}.key.c{i}{{background:var(--c{i})}}"
    for i in range(NUM_COLORS)
)
CHART_STYLE = (
    f":root{{{_LIGHT}}}@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    "svg text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    ".page{fill:var(--page)}.tick{fill:var(--soft)}.name{fill:var(--text);font-weight:600}"
    ".grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}"
    ".line{fill:none;stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}"
    ".line.faint{stroke-width:1;opacity:.38}.whisker{stroke-width:2.25;stroke-linecap:round}"
    f".dot{{stroke:var(--page);stroke-width:1.5}}{_COLORS}"
)
PAGE_STYLE = (
    CHART_STYLE
    + """
*{box-sizing:border-box}
:root{color-scheme:light dark}
body{margin:0;background:var(--page);color:var(--text);
font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;overflow-wrap:anywhere}
main{max-width:1040px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.2rem;margin:44px 0 4px}
h3{font-size:1rem;margin:0 0 6px}
p{margin:6px 0;max-width:75ch}
.soft{color:var(--soft);font-size:.9rem}
.lead{font-size:1.12rem;margin:14px 0 4px}
.badge{display:inline-block;font-size:.8rem;font-weight:600;border:1px solid currentColor;
border-radius:99px;padding:1px 10px;vertical-align:3px;margin-left:8px}
.good{color:var(--good)}.bad{color:var(--bad)}
.grid-2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:16px;margin-top:12px}
.grid-3{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,290px),1fr));gap:16px;
margin-top:16px}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(160px,1fr));gap:12px;
margin:20px 0 0;padding:0}
.fact{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 14px}
.fact b{display:block;font-size:1.25rem;line-height:1.3;font-variant-numeric:tabular-nums}
.fact b.number{white-space:nowrap}
.fact span{color:var(--soft);font-size:.85rem}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:14px;min-width:0}
figcaption{font-weight:600;margin-bottom:6px}
figcaption small{display:block;font-weight:400;color:var(--soft)}
svg.chart{display:block;width:100%;height:auto}
svg.bar{height:34px;border-radius:6px}
.keys{display:flex;flex-wrap:wrap;gap:4px 20px;list-style:none;margin:10px 0 0;padding:0;
font-size:.9rem;font-variant-numeric:tabular-nums}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:7px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);
vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:nowrap}
td.number,th.number{text-align:right}
.sample{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:12px 16px;margin-top:12px}
.sample details{margin:0}
.sample summary{font-size:.88rem}.sample summary span{margin-right:14px}
.sample summary b,.sample .keys b{color:var(--text)}
.sample .keys{color:var(--soft);font-size:.85rem}
.role{display:block;color:var(--soft);font-size:.8rem;margin-top:10px}
.filter{display:flex;flex-wrap:wrap;align-items:center;gap:8px 16px;margin-top:12px}
.filter[hidden]{display:none}
select,input,button{font:inherit;font-size:.9rem;color:inherit;background:var(--card);
border:1px solid var(--line);border-radius:6px;padding:3px 8px}
pre{white-space:pre-wrap;margin:6px 0 0;font:.86rem/1.5 ui-monospace,'SF Mono',Menlo,Consolas,
monospace}
.turn .picture{display:block;max-width:min(100%,480px);max-height:320px;margin:4px 0 0 12px}
.turn pre{border-left:3px solid var(--line);padding-left:10px;margin-top:2px}
.said pre{border-color:var(--c0)}.gold pre{border-color:var(--good)}
.note pre{border-color:var(--c4)}
h2+figure,h2+.facts{margin-top:12px}
details{margin-top:12px}summary{cursor:pointer;color:var(--soft)}
@media print{*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
main{max-width:none;padding:0}.scroll{overflow:visible}th{white-space:normal}
figure,tr,.fact{break-inside:avoid}}
@media(max-width:520px){main{padding:20px 14px 48px}h1{font-size:1.4rem}
.facts{grid-template-columns:repeat(2,1fr)}figure{padding:10px}}
"""
)
