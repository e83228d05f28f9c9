// glibc 2.36: what std::random_device takes where glibc has it.
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>

long syscall(long number, ...);

void arc4random_buf(void* buffer, size_t size) {
  for (char* next = buffer; size > 0;) {
    const long count = syscall(SYS_getrandom, next, size, 0);
    if (count > 0) {
      next += count;
      size -= count;
    } else if (errno != EINTR) {
      abort();  // nothing can be returned; glibc does the same
    }
  }
}

uint32_t arc4random(void) {
  uint32_t number;
  arc4random_buf(&number, sizeof number);
  return number;
}

uint32_t arc4random_uniform(uint32_t bound) {
  if (bound < 2) {
    return 0;
  }
  const uint32_t surplus = -bound % bound;  // 2**32 % bound: with these, small results come too often
  uint32_t number;
  do {
    number = arc4random();
  } while (number < surplus);
  return number % bound;
}
