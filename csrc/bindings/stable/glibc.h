// What headers of a newer glibc make the C++ library ask for, and an older glibc lacks.
#pragma once

// Whether atomic operations can be skipped: "no" is right in any process. glibc has it since 2.32.
extern "C" {
char __libc_single_threaded = 0;
}
