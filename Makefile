# gemma4.c: `make` builds ./gemma4, libgemma4.a and libgemma4.so; `make run`, `make bench`, `make test`, `make test-all`, `make install`.
#
# Settings, each to be given on the command line (make CC=clang OPENMP=0). A changed setting rebuilds what depends on it.

CC      = cc
OPT     = -O3
# The bits do not depend on it, the speed does. Empty for a build that is to run on other processors.
ARCH    = $(if $(filter yes,$(call try,-march=native)),-march=native)
# 1 or 0: threads. By default what the compiler can link (Apple's clang cannot).
OPENMP  = $(if $(filter yes,$(call try,-fopenmp)),1,0)
# 1: with backend_blis.c. Its library, any with cblas_sgemm, is looked for; make BLIS=1 BLAS='-I... -l...' names one.
BLIS    = 0
# 1: address and undefined-behaviour sanitizers
SAN     = 0
# not with sanitizers, whose code makes the compiler guess at sizes
WERROR  = $(if $(filter 1,$(SAN)),,-Werror)
# 1 or 0: `gemma4 serve`, which needs libmicrohttpd. By default 1 where it is found.
SERVER  = $(if $(filter yes,$(call try,-include microhttpd.h $(MICROHTTPD))),1,0)
PREFIX  = /usr/local
DESTDIR =
# Test data that is not part of the project; what needs it is skipped, aloud, when it is not there.
SHARED  = ../shared
PYTHON  = python3

# ------------------------------------------------------------------------------------------------------------------------

VERSION := $(shell sed -n 's/^\#define G4_VERSION "\(.*\)"/\1/p' gemma4.h)
try      = $(shell echo 'int main(void){return 0;}' | $(CC) $(1) -x c - -o /dev/null 2>/dev/null && echo yes)
MICROHTTPD := $(shell pkg-config --cflags --libs libmicrohttpd 2>/dev/null || echo -lmicrohttpd) -pthread
SERVER  := $(SERVER)
ARCH    := $(ARCH)
OPENMP  := $(OPENMP)
SYSTEM  := $(shell $(CC) -dumpmachine)
EXE     := $(if $(findstring mingw,$(SYSTEM)),.exe)
SO      := $(if $(findstring mingw,$(SYSTEM)),.dll,$(if $(findstring darwin,$(SYSTEM)),.dylib,.so))
B        = build
# Where the program and the libraries go: nothing, or a folder with its slash.
OUT      =

# -std=gnu11: gcc for s390x evaluates float in double under -std=c11. -ffp-contract=off: one rounding per operation.
CFLAGS_ALL = -std=gnu11 $(if $(findstring mingw,$(SYSTEM)),-D__USE_MINGW_ANSI_STDIO=1) $(if $(filter 1,$(SAN)),-O1 -g -fsanitize=address$(comma)undefined -fno-sanitize-recover=all,$(OPT)) $(ARCH) \
    -ffp-contract=off $(if $(findstring mingw,$(SYSTEM)),,-fPIC) -fvisibility=hidden $(if $(filter 1,$(OPENMP)),-fopenmp,-Wno-unknown-pragmas) \
    -Wall -Wextra -Wshadow -Wstrict-prototypes $(WERROR) $(if $(filter 1,$(SERVER)),-DG4_SERVER) -I. $(CFLAGS)
LIBS  = -lm $(BLAS)
comma = ,

CORE  = gemma4 backend_cpu quants checkpoint gguf tokenizer sampler chat answer statefile engine

# What links, with pkg-config's flags or by its name; then whether it can be told about threads.
ifeq ($(BLIS),1)
sgemm   = cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, 1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 1)
links   = echo 'void bli_thread_set_num_threads(long); void openblas_set_num_threads(int); int main(void) { $(1); return 0; }' | $(CC) -include cblas.h -x c - -x none $(2) -o /dev/null 2>/dev/null
BLAS   := $(shell for name in blis cblas openblas; do for flags in "$$(pkg-config --cflags --libs $$name 2>/dev/null)" "-l$$name"; do \
    test -n "$$flags" && $(call links,$(sgemm),$$flags) && echo "$$flags" && exit; done; done)
ifneq ($(shell $(call links,$(sgemm),$(BLAS)) && echo yes),yes)
$(error BLIS=1: $(if $(BLAS),BLAS='$(BLAS)' does not link cblas_sgemm,none of blis$(comma) cblas and openblas links cblas_sgemm) with its cblas.h: install Debian's libblis-dev or another BLAS, or name one: make BLIS=1 BLAS='-I... -l...')
endif
CORE   += backend_blis
ABOUT_THREADS := $(if $(filter yes,$(shell $(call links,bli_thread_set_num_threads(1),$(BLAS)) && echo yes)),-DG4_BLAS_BLIS) \
    $(if $(filter yes,$(shell $(call links,openblas_set_num_threads(1),$(BLAS)) && echo yes)),-DG4_BLAS_OPENBLAS)
CFLAGS_ALL += -DG4_BLIS $(ABOUT_THREADS) $(filter -I% -D%,$(BLAS))
endif
CLI   = main bench tracefile terminal
ifeq ($(SERVER),1)
CLI   += server page
endif
TESTS = $(patsubst test/%.c,%,$(wildcard test/test_*.c))

all: $(OUT)gemma4$(EXE) $(OUT)libgemma4.a $(OUT)libgemma4$(SO)

# Objects depend on the settings they were made with.
$(B)/settings: FORCE
	@mkdir -p $(B)
	@echo '$(CC) $(CFLAGS_ALL) $(PREFIX)' | cmp -s - $@ || echo '$(CC) $(CFLAGS_ALL) $(PREFIX)' > $@
FORCE:
# test objects are kept: deleting them at the end would hide the result in the last line
.SECONDARY:

$(B)/%.o: %.c $(B)/settings
	$(CC) $(CFLAGS_ALL) -MMD -MP -DG4_MODEL_DIR='"$(PREFIX)/share/gemma4/austen"' -c $< -o $@
$(B)/%.o: test/%.c $(B)/settings
	$(CC) $(CFLAGS_ALL) -MMD -MP -c $< -o $@
-include $(wildcard $(B)/*.d)

# The page at / as bytes in the program.
$(B)/page.c: page.html $(B)/settings
	{ echo '#include <stddef.h>'; echo 'extern const unsigned char page_html[]; extern const size_t page_html_size;'; echo 'const unsigned char page_html[] = {'; \
	    od -An -v -tu1 page.html | sed 's/[0-9][0-9]*/&,/g'; echo '};'; echo 'const size_t page_html_size = sizeof page_html;'; } > $@
$(B)/page.o: $(B)/page.c
	$(CC) $(CFLAGS_ALL) -c $< -o $@

$(OUT)libgemma4.a: $(CORE:%=$(B)/%.o)
	rm -f $@
	$(AR) rcs $@ $^
$(OUT)libgemma4$(SO): $(CORE:%=$(B)/%.o)
	$(CC) $(CFLAGS_ALL) -shared $^ $(LIBS) -o $@
$(OUT)gemma4$(EXE): $(CLI:%=$(B)/%.o) $(OUT)libgemma4.a
	$(CC) $(CFLAGS_ALL) $^ $(LIBS) $(if $(filter 1,$(SERVER)),$(MICROHTTPD)) $(LDFLAGS) -o $@
$(B)/test_%$(EXE): $(B)/test_%.o $(B)/tracefile.o $(OUT)libgemma4.a
	$(CC) $(CFLAGS_ALL) $^ $(LIBS) $(LDFLAGS) -o $@

# Built by test/fuzz.sh, with clang's flags.
$(B)/fuzz: $(B)/fuzz.o $(patsubst %,$(B)/%.o,$(filter-out main backend_cpu,$(CORE) $(CLI)))
	$(CC) $(CFLAGS_ALL) $^ $(LIBS) $(if $(filter 1,$(SERVER)),$(MICROHTTPD)) $(LDFLAGS) -o $@

run: all
	./gemma4 run -p "It is a truth universally acknowledged, that" -n 160 --seed 10

bench: all
	./gemma4 bench
	./gemma4 bench --kernels

# Quick: a C compiler, no network, under a minute.
test: all $(TESTS:%=$(B)/%$(EXE))
	@SHARED='$(wildcard $(SHARED))' sh test/run.sh $(OUT)gemma4$(EXE) $(TESTS:%=$(B)/%$(EXE))

# Everything: also with sanitizers, and against transformers and tokenizers (installs reference/requirements.txt into build/venv).
test-all: test slow-test
# The same hash from every compiler, processor and system (README, "One set of bits"); installs Debian's cross compilers.
matrix:
	sh test/matrix.sh
# Changes the sources in ways that a porter plausibly does (test/mutations.txt), and requires the tests to notice.
mutate:
	$(PYTHON) test/mutate.py
long: all
	sh test/long.sh
coverage:
	sh test/coverage.sh
# The parsers under libFuzzer, to FUZZ executions in all; goes on where it was stopped.
FUZZ    = 100000000
fuzz: all
	sh test/fuzz.sh $(FUZZ)
slow-test: all $(TESTS:%=$(B)/%$(EXE))
	@SHARED='$(wildcard $(SHARED))' CC='$(CC)' PYTHON='$(PYTHON)' sh test/all.sh

install: all
	mkdir -p $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/share/gemma4
	cd $(DESTDIR)$(PREFIX)/share && mkdir -p man/man1 bash-completion/completions zsh/site-functions
	cp gemma4$(EXE) $(DESTDIR)$(PREFIX)/bin/
	cp libgemma4.a libgemma4$(SO) $(DESTDIR)$(PREFIX)/lib/
	cp gemma4.h $(DESTDIR)$(PREFIX)/include/
	cp -r models/austen $(DESTDIR)$(PREFIX)/share/gemma4/
	cp gemma4.1 $(DESTDIR)$(PREFIX)/share/man/man1/
	cp completion/gemma4.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/gemma4
	cp completion/_gemma4 $(DESTDIR)$(PREFIX)/share/zsh/site-functions/
	printf 'prefix=%s\nlibdir=$${prefix}/lib\nincludedir=$${prefix}/include\n\nName: gemma4\nDescription: Gemma 4 text models in plain C\nVersion: %s\nLibs: -L$${libdir} -lgemma4\nLibs.private: -lm%s\nCflags: -I$${includedir}\n' \
	    '$(PREFIX)' '$(VERSION)' '$(if $(filter 1,$(OPENMP)), -fopenmp)$(if $(BLAS), $(BLAS))' > $(DESTDIR)$(PREFIX)/lib/pkgconfig/gemma4.pc

clean:
	rm -rf $(B) $(OUT)gemma4$(EXE) $(OUT)libgemma4.a $(OUT)libgemma4$(SO)

.PHONY: all run bench test test-all slow-test matrix mutate long coverage fuzz install clean FORCE
