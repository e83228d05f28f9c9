// glibc 2.38: its headers rename strtol and the like to these, which also read C23's 0b101.
#include <inttypes.h>
#include <locale.h>
#include <stdlib.h>
#include <wchar.h>

#define READ(type, name, character) \
  type __isoc23_##name(const character* text, character** end, int base) { return name(text, end, base); }

#define READ_IN_LOCALE(type, name, character)                                                \
  type name##_l(const character*, character**, int, void*);                                  \
  type __isoc23_##name##_l(const character* text, character** end, int base, void* locale) { \
    return name##_l(text, end, base, locale);                                                \
  }

READ(long, strtol, char)
READ(unsigned long, strtoul, char)
READ(long long, strtoll, char)
READ(unsigned long long, strtoull, char)
READ(intmax_t, strtoimax, char)
READ(uintmax_t, strtoumax, char)
READ(long, wcstol, wchar_t)
READ(unsigned long, wcstoul, wchar_t)
READ(long long, wcstoll, wchar_t)
READ(unsigned long long, wcstoull, wchar_t)
READ(intmax_t, wcstoimax, wchar_t)
READ(uintmax_t, wcstoumax, wchar_t)

READ_IN_LOCALE(long, strtol, char)
READ_IN_LOCALE(unsigned long, strtoul, char)
READ_IN_LOCALE(long long, strtoll, char)
READ_IN_LOCALE(unsigned long long, strtoull, char)
READ_IN_LOCALE(long, wcstol, wchar_t)
READ_IN_LOCALE(unsigned long, wcstoul, wchar_t)
READ_IN_LOCALE(long long, wcstoll, wchar_t)
READ_IN_LOCALE(unsigned long long, wcstoull, wchar_t)
