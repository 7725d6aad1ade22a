// Loads the library whose file is given, and prints the instructions that it uses.
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char** names) {
  void* library = count == 2 ? dlopen(names[1], RTLD_NOW) : NULL;
  if (library == NULL || dlsym(library, "RegisterCustomOps") == NULL) {
    puts(dlerror());
    return 1;
  }
  const char* (*isa)(void) = (const char* (*)(void))dlsym(library, "jetdraft_isa");
  puts(isa());
  return 0;
}
