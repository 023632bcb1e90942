# SPDX-License-Identifier: Apache-2.0
"""Texts that try to become tags, scripts or addresses of a page."""

import itertools

_TAGS = (
    "<script>document.title='hacked'</script>",
    '"><img src=x onerror="document.title=`hacked`">',
    "'><svg onload=document.title='hacked'>",
    "</pre></div></main><iframe srcdoc='<script>parent.document.title=`hacked`</script>'>",
    "<style>*{display:none}</style>",
    "<base href=//hacked.example><link rel=stylesheet href=//hacked.example/x.css>",
    "</script><script>document.title='hacked'</script>",
    "<!--<script>",
    "{{document.title='hacked'}}${document.title='hacked'}",
    "&lt;b&gt;&amp;\\u003cscript\\u003e",
    "<details open ontoggle=document.title='hacked'>",
    "javascript:document.title='hacked'",
    "</title><script>document.title='hacked'</script>",
    "<a href=javascript:alert(1) id=browser name=data>x</a>",
    "<form id=samples><input name=rows>",
    "__proto__",
    "]]>--></textarea><plaintext>",
    "\x00\x1b[31m\u202egnp.exe\u2028\u2029",
    "\ud800<b>\udfff",
    "<ScRiPt\n>document.title='hacked'</sCrIpT\n>",
)
_AROUND = ("{}", "a {} b", '" {}', "' {}", "</pre>{}", "-->{}", "`{}`", "\\{}", "{}\\", "\r\n{}")
HOSTILE = [around.replace("{}", tag) for tag, around in itertools.product(_TAGS, _AROUND)]
assert len(set(HOSTILE)) == 200
