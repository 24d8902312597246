// The site shows what is in ../docs, in the order of ../docs/README.md.
import { existsSync, readFileSync, statSync } from 'node:fs'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { defineConfig } from 'vitepress'

const docs = fileURLToPath(new URL('../../docs', import.meta.url))
const root = path.dirname(docs)
const github = 'https://github.com/simple-workflow/simple-workflow'

// sidebar reads the index: each heading is a group, and each list item that begins with a link to a page is an entry.
// An item without a link is the name of those that are indented below it.
function sidebar() {
  const groups = []
  let below
  for (const line of readFileSync(path.join(docs, 'README.md'), 'utf8').split('\n')) {
    const [, heading] = /^## (.+)$/.exec(line) ?? []
    const [, indent, name, link] = /^( *)- (?:\[([^\]]+)\]\(([^):#]+)\.md\))?/.exec(line) ?? []
    const entry = name && !link.startsWith('..') && { text: name.replaceAll('`', ''), link: '/' + link }
    if (heading) {
      groups.push({ text: heading, collapsed: false, items: [] })
      below = undefined
    } else if (entry && indent && below) {
      below.items.push(entry)
    } else if (entry) {
      groups.at(-1).items.push(entry)
    } else if (indent === '') {
      below = { text: line.slice(2), collapsed: true, items: [] }
      groups.at(-1).items.push(below)
    }
  }
  const full = (item) => item.link || item.items.length > 0
  return groups.map((group) => ({ ...group, items: group.items.filter(full) })).filter(full)
}

// outside returns the address on GitHub of a file that is no page of the site, and null for a page or another site.
function outside(href, page) {
  if (/^([a-z]+:|\/|#)/i.test(href)) return null
  const [target, anchor] = href.split('#')
  const file = path.resolve(path.dirname(page), decodeURIComponent(target))
  const inside = file.startsWith(docs + path.sep)
  if (inside && file.endsWith('.md')) return null // VitePress itself reports one that is missing
  if (!existsSync(file)) throw new Error(`${page}: dead link ${href}`)
  const kind = statSync(file).isDirectory() ? 'tree' : 'blob'
  return `${github}/${kind}/main/${path.relative(root, file)}` + (anchor ? '#' + anchor : '')
}

// links rewrites what leads out of ../docs, and what leads to the index.
function links(md) {
  md.core.ruler.push('links', (state) => {
    const page = path.join(docs, state.env.realPath ? path.relative(docs, state.env.realPath) : state.env.relativePath)
    for (const token of state.tokens.flatMap((t) => t.children ?? [])) {
      const href = token.type === 'link_open' ? token.attrGet('href') : null
      if (!href) continue
      const address = outside(href, page)
      if (address) token.attrSet('href', address)
      else token.attrSet('href', href.replace(/(^|\/)README\.md(?=#|$)/, '$1index.md'))
    }
  })
}

// mermaid gives the blocks of that language to the component that draws them.
function mermaid(md) {
  const fence = md.renderer.rules.fence
  md.renderer.rules.fence = (tokens, at, ...rest) =>
    tokens[at].info.trim() === 'mermaid'
      ? `<Mermaid code="${encodeURIComponent(tokens[at].content)}" />`
      : fence(tokens, at, ...rest)
}

export default defineConfig({
  title: 'simple-workflow',
  description: 'Durable work on nothing but Postgres',
  lang: 'en',
  base: process.env.SITE_BASE ?? '/',
  srcDir: '../docs',
  outDir: './dist',
  cacheDir: './.vitepress/cache',
  rewrites: { 'README.md': 'index.md' },
  ignoreDeadLinks: false,
  markdown: {
    // Headings have the anchors that they have on GitHub.
    anchor: {
      slugify: (text) => text.trim().toLowerCase().replace(/[^\p{L}\p{N} _-]/gu, '').replaceAll(' ', '-'),
    },
    config(md) {
      links(md)
      mermaid(md)
    },
  },
  themeConfig: {
    sidebar: sidebar(),
    nav: [
      { text: 'Documentation', link: '/' },
      { text: 'Go API', link: 'https://pkg.go.dev/github.com/simple-workflow/simple-workflow' },
    ],
    outline: [2, 3],
    search: { provider: 'local' },
    socialLinks: [{ icon: 'github', link: github }],
    editLink: { pattern: `${github}/edit/main/docs/:path` },
  },
  vite: {
    // The pages lie outside of this folder: what they import is found here all the same.
    resolve: { alias: { vue: fileURLToPath(new URL('../node_modules/vue', import.meta.url)) } },
    build: { chunkSizeWarningLimit: 2000 },
  },
})
