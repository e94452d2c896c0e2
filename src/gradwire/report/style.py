"""The page's style sheet. Dark text on white; patterns beside colours; nothing wider than the window."""

STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .25rem 0; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .5rem; padding-top: .5rem; border-top: 2px solid #1a1a1a; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p, ul, figure, table { margin: .5rem 0; }
.lead { font-size: 1.15rem; }
.note { color: #444; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: .5rem 2rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0; padding: 0; }
.facts div { border: 1px solid #888; border-radius: 4px; padding: .5rem .75rem; }
.facts dt { font-size: .8rem; color: #444; }
.facts dd { margin: 0; font-size: 1.3rem; font-weight: 600; }
code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .85rem; }
pre { white-space: pre-wrap; background: #f3f3f3; padding: .5rem; margin: .5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .75rem .15rem 0; text-align: right; border-bottom: 1px solid #ccc; vertical-align: top; }
th:first-child { text-align: left; font-weight: 400; }
thead th { font-weight: 600; white-space: nowrap; }
figcaption { font-size: .9rem; }
.key { display: inline-block; margin-right: .9rem; white-space: nowrap; font-size: .85rem; }
.sample { width: 30px; height: 10px; vertical-align: middle; }
.unit { font-size: .8rem; color: #444; }
.right { text-align: right; }
.chart { display: grid; grid-template: 13rem 1.4rem / 3.2rem 1fr; margin-right: 1rem; }
.plot { border-left: 1px solid #1a1a1a; border-bottom: 1px solid #1a1a1a; }
.plot svg { display: block; width: 100%; height: 100%; overflow: visible; }
.plot polyline { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.plot .grid { stroke: #ddd; stroke-width: 1; vector-effect: non-scaling-stroke; }
.y, .x { position: relative; font-size: .75rem; white-space: nowrap; }
.y span { position: absolute; right: .35rem; transform: translateY(50%); line-height: 1; }
.x { grid-column: 2; height: 1.4rem; }
.x span { position: absolute; transform: translateX(-50%); top: .15rem; }
.bars { list-style: none; padding: 0; }
.bars li { display: grid; grid-template-columns: minmax(0, 17rem) 1fr minmax(0, 17rem); gap: 0 .75rem; align-items: center;
  padding: .15rem 0; border-bottom: 1px solid #eee; font-size: .9rem; line-height: 1.3; }
.strip { position: relative; height: 1rem; }
.strip i { position: absolute; top: 0; bottom: 0; min-width: 1px; }
.outline { border: 1px solid #555; background: #fff; }
.value { font-variant-numeric: tabular-nums; }
.lanes { margin-right: 1rem; }
.lane { display: grid; grid-template-columns: 6rem 1fr; gap: .5rem; align-items: center; margin: 2px 0; font-size: .8rem;
  line-height: 1.15; }
.lane em { display: block; color: #444; }
.track { position: relative; height: max(1.9rem, calc(var(--rows) * 1rem)); background: #f3f3f3; }
.track i { position: absolute; top: calc(var(--row) * 100% / var(--rows)); height: calc(100% / var(--rows)); min-width: 1px;
  overflow: hidden; }
.track .wide { border-left: 1px solid #fff; }
.track b { position: absolute; left: 1px; top: 0; background: #fff; color: #1a1a1a; font: 600 .65rem/1.1 system-ui, sans-serif;
  padding: 0 2px; }
.swatch { display: inline-block; width: 1.4rem; height: .8rem; vertical-align: middle; border: 1px solid #555; }
.strip i, .track i, .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.solid, .k-forward { background: #0072B2; }
.k-backward { background: repeating-linear-gradient(45deg, #56B4E9 0 4px, #0072B2 4px 6px); }
.k-optimizer { background: repeating-linear-gradient(0deg, #1a1a1a 0 1px, #d9d9d9 1px 4px); }
.k-encode { background: repeating-linear-gradient(90deg, #E69F00 0 3px, #7a5200 3px 4px); }
.hatched, .k-decode { background: repeating-linear-gradient(-45deg, #D55E00 0 3px, #fff 3px 5px); }
.k-launch { background: #1a1a1a; }
.k-other { background: #999; }
.k-reduce-phase { background: #006b4f; }
.k-gather-phase { background: repeating-linear-gradient(45deg, #009E73 0 3px, #fff 3px 5px); }
.dotted, .k-all-reduce { background: radial-gradient(#1a1a1a 25%, #CC79A7 27%) 0 0 / 6px 6px; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
@media (max-width: 40rem) {
  .bars li { grid-template-columns: 1fr; gap: .1rem; padding: .35rem 0; }
  .lane { grid-template-columns: 4.4rem 1fr; }
  th, td { padding-right: .4rem; }
}
"""
