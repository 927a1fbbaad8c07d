"""Style sheet of the pages, for narrow and wide screens, light and dark mode, and print."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f6f7f9; --ink: #1d2129; --soft: #5a6270; --edge: #d7dbe2; --link: #0b57b0; --good: #00704a;
  --grid: #e3e6ea; --faint: #868d98; --alarm: #c00000;
  --line-0: #0072b2; --line-1: #d55e00; --line-2: #00875f; --line-3: #b0508c;
  --line-4: #7a6a00; --line-5: #3a9bd0; --line-6: #a03030; --line-7: #606060;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --panel: #1d2129; --ink: #e6e8ec; --soft: #a3abb8; --edge: #363c47; --link: #7db8ff; --good: #4fd19c;
    --grid: #2b313a; --faint: #8a919d; --alarm: #ff7066;
    --line-0: #56b4e9; --line-1: #ff9a4d; --line-2: #3fd0a0; --line-3: #e79ac8;
    --line-4: #e0cf4a; --line-5: #9ad7ff; --line-6: #ff9c94; --line-7: #b9bec7;
  }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 3.2rem; -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
header, main, footer { max-width: 76rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.2rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .7rem; padding-bottom: .25rem; border-bottom: 1px solid var(--edge); }
h3 { font-size: 1.02rem; margin: 1.4rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .5rem 0; max-width: 46rem; }
a { color: var(--link); }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .87em; overflow-wrap: anywhere; }
.soft, figcaption, caption { color: var(--soft); font-size: .9rem; }
.alarm { color: var(--alarm); }
.state { display: inline-block; border: 1px solid currentColor; border-radius: 1rem; padding: 0 .6rem; font-weight: 600; }
.state.finished { color: var(--good); } .state.failed { color: var(--alarm); }
nav { position: sticky; top: 0; z-index: 2; background: var(--paper); border-bottom: 1px solid var(--edge); margin-top: .8rem; }
nav ul {
  display: flex; gap: 1.1rem; list-style: none; max-width: 76rem; margin: 0 auto; padding: 0 0 0 1rem; overflow-x: auto;
  -webkit-mask-image: linear-gradient(to right, #000 calc(100% - 3rem), transparent);
  mask-image: linear-gradient(to right, #000 calc(100% - 3rem), transparent);
}
nav li:last-child { padding-right: 3rem; }
nav a { display: block; padding: .65rem 0; white-space: nowrap; text-decoration: none; }
nav a:hover, nav a:focus { text-decoration: underline; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 1rem 0; padding: 0; }
.facts > div { background: var(--panel); border-radius: .5rem; padding: .6rem .8rem; }
.facts dt { color: var(--soft); font-size: .82rem; }
.facts dd { margin: 0; font-size: 1.2rem; font-weight: 600; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; min-width: min(100%, 26rem); font-size: .92rem; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { text-align: left; vertical-align: top; padding: .32rem .75rem .32rem 0; border-bottom: 1px solid var(--edge); }
th { font-weight: 600; } thead th { color: var(--soft); white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.words { min-width: 14rem; max-width: 34rem; overflow-wrap: anywhere; }
tr.best > * { background: var(--panel); font-weight: 600; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: .9rem; }
.pictures figure { margin: 0; background: var(--panel); border-radius: .5rem; padding: .7rem .7rem .4rem; }
.pictures h3 { margin: 0; font-size: .98rem; }
.pictures svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; }
figure { margin: 1rem 0; }
.photo { background: #fff; border: 1px solid var(--edge); border-radius: .5rem; }
.photo img { display: block; }
.photo.wide img { min-width: 52rem; width: 100%; height: auto; }
.photo.small img { max-width: 100%; height: auto; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--link); padding: .3rem 0; }
footer { color: var(--soft); font-size: .85rem; padding: 2rem 1rem 1.5rem; }
@media print {
  nav { position: static; }
  nav ul { flex-wrap: wrap; -webkit-mask-image: none; mask-image: none; }
  .pictures figure, tr { break-inside: avoid; }
  .photo.wide img { min-width: 0; }
}
"""
