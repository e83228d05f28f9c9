// glibc 2.33: before, each program had these from a static part of glibc. The kernel's structure is glibc's.
#include <linux/fcntl.h>
#include <sys/syscall.h>

long syscall(long number, ...);

#define STAT(bits)                                                                                    \
  int fstatat##bits(int folder, const char* path, void* result, int flags) {                          \
    return (int)syscall(SYS_newfstatat, folder, path, result, flags);                                 \
  }                                                                                                   \
  int stat##bits(const char* path, void* result) { return fstatat##bits(AT_FDCWD, path, result, 0); } \
  int lstat##bits(const char* path, void* result) {                                                   \
    return fstatat##bits(AT_FDCWD, path, result, AT_SYMLINK_NOFOLLOW);                                \
  }                                                                                                   \
  int fstat##bits(int file, void* result) { return (int)syscall(SYS_fstat, file, result); }

STAT()
STAT(64)
