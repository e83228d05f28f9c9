// glibc 2.38: its headers rename scanf and the like to these, which also read C23's 0b101.
#include <stdarg.h>
#include <stdio.h>
#include <wchar.h>

#define SCAN(name, input, character)                                            \
  int __isoc23_v##name(input source, const character* format, va_list values) { \
    return v##name(source, format, values);                                     \
  }                                                                             \
  int __isoc23_##name(input source, const character* format, ...) {             \
    va_list values;                                                             \
    va_start(values, format);                                                   \
    const int count = v##name(source, format, values);                          \
    va_end(values);                                                             \
    return count;                                                               \
  }

SCAN(fscanf, FILE*, char)
SCAN(sscanf, const char*, char)
SCAN(fwscanf, FILE*, wchar_t)
SCAN(swscanf, const wchar_t*, wchar_t)

#define SCAN_STDIN(name, character)                                                                         \
  int __isoc23_v##name(const character* format, va_list values) { return vf##name(stdin, format, values); } \
  int __isoc23_##name(const character* format, ...) {                                                       \
    va_list values;                                                                                         \
    va_start(values, format);                                                                               \
    const int count = vf##name(stdin, format, values);                                                      \
    va_end(values);                                                                                         \
    return count;                                                                                           \
  }

SCAN_STDIN(scanf, char)
SCAN_STDIN(wscanf, wchar_t)
