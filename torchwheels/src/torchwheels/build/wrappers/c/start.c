// glibc 2.34: its crt1.o has __libc_start_main run the constructors of a program, which an older one leaves to the
// program.
#ifdef __aarch64__
#define FIRST "GLIBC_2.17"
#else
#define FIRST "GLIBC_2.2.5"
#endif

typedef void function(int, char**, char**);
typedef int start(function*, int, char**, function*, void (*)(void), void (*)(void), void*);

extern start first_start;
__asm__(".symver first_start, __libc_start_main@" FIRST);
extern function* __init_array_start[] __attribute__((visibility("hidden")));
extern function* __init_array_end[] __attribute__((visibility("hidden")));
extern void _init(void) __attribute__((visibility("hidden")));

static void construct(int count, char** words, char** variables) {
  _init();
  for (function** each = __init_array_start; each < __init_array_end; ++each) {
    (*each)(count, words, variables);
  }
}

int __libc_start_main(
    function* run, int count, char** words, function* init, void (*end)(void), void (*unload)(void), void* stack) {
  return first_start(run, count, words, init ? init : construct, end, unload, stack);
}
