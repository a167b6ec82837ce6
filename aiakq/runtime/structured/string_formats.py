"""Formats of strings that are enforced exactly, as regular expressions; all other formats are annotations.

A value of ``PATTERNS`` is a list of expressions, each of which the whole string matches.
"""

from __future__ import annotations

from collections.abc import Iterable

_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_HOUR, _MINUTE, _FRACTION = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]", r"(?:\.[0-9]+)?"
_OFFSET = f"(?:[zZ]|[+-]{_HOUR}:{_MINUTE})"


def _times(date: str = "", any_date: str = "") -> tuple[str, ...]:
    """Times after ``date``, in second 60 only with an offset whose hour and minute can be those of 23:59 UTC.

    The first expression is exact but for that. The others say how the hour, the tens of the minute and its ones belong
    to the offset, and nothing else: they are parsed for every schema, and a string in another second matches them soon.

    any_date  what all of ``date`` match.
    """
    rest, second = "[-+:.0-9Zz]*", "6[:.0-9]*"

    def of_offset(length: int, alternatives: Iterable[str], utc: str, end: str = "") -> str:
        skipped = f"[:0-9]{{{length}}}" if length else ""
        ends = f"(?:{'|'.join(alternatives)}){end}"
        return f"{any_date}{skipped}(?:[:0-9]{{{6 - length}}}[0-5]{rest}|{utc}:{second}[zZ]|{ends})"

    hours = (
        f"{hour:02}:[0-9]{{2}}:{second}(?:\\+(?:{hour:02}:(?:0[1-9]|[1-5])|{(hour + 1) % 24:02}:00)|-{23 - hour:02})"
        for hour in range(24)
    )
    tens = (f"{ten}[0-9]:{second}(?:-[0-9]+:{5 - ten}|\\+[0-9]+:(?:{ten}[1-9]|{(ten + 1) % 6}0))" for ten in range(6))
    ones = (f"{one}:{second}(?:-[0-9]+:[0-5]{9 - one}|\\+[0-9]+:[0-5]{(one + 1) % 10})" for one in range(10))
    return (
        f"{date}{_HOUR}:{_MINUTE}:(?:[0-5][0-9]|60){_FRACTION}{_OFFSET}",
        of_offset(0, hours, "23:59", rest),
        of_offset(3, tens, "5[0-9]", "[0-9]?"),
        of_offset(4, ones, "9"),
    )


_DURATION_TIME = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = r"(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"


def _ipv6() -> str:
    """IPv6 addresses: those that end with two groups or an IPv4 address, which is written once, and the others."""
    group = f"{_H16}:"
    before = ["", f"(?:{_H16})?", *(f"(?:(?:{group}){{0,{most}}}{_H16})?" for most in range(1, 7))]
    long = [f"(?:{group}){{6}}", f"::(?:{group}){{5}}"]
    long += [f"{before[most]}::(?:{group}){{{5 - most}}}" for most in range(1, 5)] + [f"{before[5]}::"]
    return f"(?:(?:{'|'.join(long)}){_LS32}|{before[6]}::{_H16}|{before[7]}::)"


_IPV6 = _ipv6()


_ALNUM, _LDH = "[A-Za-z0-9]", "[A-Za-z0-9-]"
#: A label without hyphens in both its third and its fourth place: those are names in Punycode, whose rules no regular
#: expression can express, so that none is generated.
_LABEL = f"{_ALNUM}(?:{_ALNUM}|{_LDH}(?:{_ALNUM}(?:{_LDH}{{0,59}}{_ALNUM})?|-{_ALNUM}(?:{_LDH}{{0,58}}{_ALNUM})?))?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATEXT = r"[A-Za-z0-9!#$%\x26'*+\-/=?\^_`{|}\x7E]"
_QUOTED = r'"(?:[\x20\x21\x23-\x5B\x5D-\x7D\x7E]|\\[\x20-\x7D\x7E])*"'
_SUB_DOMAIN = f"{_ALNUM}(?:{_LDH}*{_ALNUM})?"
_EMAIL = (
    rf"(?:{_ATEXT}+(?:\.{_ATEXT}+)*|{_QUOTED})"
    rf"@(?:{_SUB_DOMAIN}(?:\.{_SUB_DOMAIN})*|\[{_IPV4}\]|\[[Ii][Pp][Vv]6:{_IPV6}\])"
)

#: Characters of identifiers beyond ASCII (RFC 3987), in any part and only in the query.
_UCS = (
    r"\x{A0}-\x{D7FF}\x{F900}-\x{FDCF}\x{FDF0}-\x{FFEF}"
    + "".join(rf"\x{{{plane:X}0000}}-\x{{{plane:X}FFFD}}" for plane in range(1, 14))
    + r"\x{E1000}-\x{EFFFD}"
)
_PRIVATE = r"\x{E000}-\x{F8FF}\x{F0000}-\x{FFFFD}\x{100000}-\x{10FFFD}"
_PERCENT = "%[0-9A-Fa-f]{2}"


def _identifiers(more: str, private: str) -> tuple[str, str]:
    """URIs and references to them (RFC 3986), with the characters ``more``, and ``private`` in the query."""
    plain = r"A-Za-z0-9\-._\x7E!$\x26'()*+,;=" + more
    path_char = f"(?:[{plain}:@]|{_PERCENT})"
    first = f"(?:[{plain}@]|{_PERCENT})"
    host = rf"(?:\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\.[A-Za-z0-9\-._\x7E!$\x26'()*+,;=:]+)\]|(?:[{plain}]|{_PERCENT})*)"
    authority = f"//(?:(?:[{plain}:]|{_PERCENT})*@)?{host}(?::[0-9]*)?(?:/{path_char}*)*"
    absolute = f"/(?:{path_char}+(?:/{path_char}*)*)?"
    rootless = f"{path_char}+(?:/{path_char}*)*"
    no_scheme = f"{first}+(?:/{path_char}*)*"
    scheme = "[A-Za-z][A-Za-z0-9+.-]*:"
    end = rf"(?:\?(?:[{plain}:@/?{private}]|{_PERCENT})*)?(?:#(?:[{plain}:@/?]|{_PERCENT})*)?"
    whole = f"{scheme}(?:{authority}|{absolute}|{rootless})?{end}"
    reference = f"(?:(?:{scheme})?(?:{authority}|{absolute})?|{scheme}{rootless}|{no_scheme}){end}"
    return whole, reference


_URI, _URI_REFERENCE = _identifiers("", "")
_IRI, _IRI_REFERENCE = _identifiers(_UCS, _PRIVATE)
_LITERAL = rf"(?:[!#$\x26'()*+,\-./0-9:;=?@A-Z\[\]_a-z\x7E{_UCS}{_PRIVATE}]|{_PERCENT})"
_VARCHAR = f"(?:[A-Za-z0-9_]|{_PERCENT})"
_VARSPEC = rf"{_VARCHAR}(?:\.?{_VARCHAR})*(?::[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = rf"(?:{_LITERAL}|\{{[+#./;?\x26=,!@|]?{_VARSPEC}(?:,{_VARSPEC})*\}})*"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_HEX = "[0-9A-Fa-f]"

#: Host names up to draft 6, where names in Punycode are like any other.
HOSTNAME_UP_TO_6 = (
    rf"{_ALNUM}(?:{_LDH}{{0,61}}{_ALNUM})?(?:\.{_ALNUM}(?:{_LDH}{{0,61}}{_ALNUM})?)*",
    r"[A-Za-z0-9.-]{1,253}",
)
PATTERNS: dict[str, tuple[str, ...]] = {
    "date": (_DATE,),
    "time": _times(),
    "date-time": _times(f"{_DATE}[tT]", "[-0-9]{10}[tT]"),
    "duration": (_DURATION,),
    "email": (_EMAIL,),
    "hostname": (_HOSTNAME, r"[A-Za-z0-9.-]{1,253}"),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "uri": (_URI,),
    "uri-reference": (_URI_REFERENCE,),
    "iri": (_IRI,),
    "iri-reference": (_IRI_REFERENCE,),
    "uri-template": (_URI_TEMPLATE,),
    "json-pointer": (_POINTER,),
    "relative-json-pointer": (rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",),
    "uuid": (f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",),
}
#: The same as patterns of JSON schemas, which match anywhere in a string.
ANCHORED = {name: tuple(f"^(?:{each})$" for each in patterns) for name, patterns in PATTERNS.items()}
ANCHORED_HOSTNAME_UP_TO_6 = tuple(f"^(?:{each})$" for each in HOSTNAME_UP_TO_6)
